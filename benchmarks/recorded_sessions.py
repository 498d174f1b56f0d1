"""Recorded sessions as the trainer gets them: imported like in a replay, into a temporary store.
Shared by the replay's benchmarks.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opd.replay.importing import ImportSettings, prepare_session
from opd.replay.recordings.reading import read_recordings
from opd.replay.recordings.recorded import RecordedSession
from opd.replay.run_replay import DEFAULTS, LAB_MODEL
from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.defaults import resolve, single_machine
from records.config import StoreConfig
from records.store import Store
from records.types import Ids, ReadySample, VersionSpan
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering

ROOT = Path(__file__).parents[1]
SESSIONS = ROOT / "tests" / "data" / "replay" / "tau_bench_airline_sessions.jsonl"
"""Four of the sessions; these are in the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn with a next state; only these can be judged and trained on."""

    turn_id: str
    session_id: str
    prompt_ids: Ids
    response_ids: Ids


def replay_config(folder: Path, model: Path = LAB_MODEL) -> RunConfig:
    """The configuration of `opd replay` when nothing is set."""
    values = run_config.merge(single_machine(str(model), folder), DEFAULTS)
    return resolve(values, None, [])


def imported_turns(paths: Sequence[Path], model: Path = LAB_MODEL) -> list[Turn]:
    """The recordings' turns that can train, in the order in which a trainer leases them."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        config = replay_config(folder, model)
        return asyncio.run(_imported(paths, config, folder))


async def _imported(paths: Sequence[Path], config: RunConfig, folder: Path) -> list[Turn]:
    rendering = Rendering.load(config.model, config.renderer)
    settings = import_settings(config, rendering)
    turns = []
    async with await Store.open(StoreConfig.sqlite(folder / "imported.db")) as store:
        for item in read_recordings(paths):
            if not isinstance(item, RecordedSession):
                continue
            prepared = prepare_session(item, rendering, store.redactor, settings, time.time()).rows
            if prepared is None:
                continue
            await store.import_session(prepared)
            for one in prepared.next_states:
                prompt_ids, response_ids = await store.turn_tokens(one.turn_id)
                turns.append(
                    Turn(
                        turn_id=one.turn_id,
                        session_id=prepared.session_id,
                        prompt_ids=prompt_ids,
                        response_ids=response_ids,
                    )
                )
    return turns


def import_settings(config: RunConfig, rendering: Rendering) -> ImportSettings:
    """The settings of a replay's import."""
    return ImportSettings(
        context_length=config.scoring.context_length,
        held_out=config.replay.held_out,
        renderer=renderer_fingerprint(rendering, config.renderer),
    )


def ready_samples(turns: Sequence[Turn], seed: int = 0) -> list[ReadySample]:
    """`turns` as if scored; log-probs of rollout and teacher are drawn from N(-3, 1)."""
    generator = np.random.default_rng(seed)
    return [
        ReadySample(
            turn_id=turn.turn_id,
            session_id=turn.session_id,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            rollout_logprobs=_drawn(generator, len(turn.response_ids)),
            teacher_logprobs=_drawn(generator, len(turn.response_ids)),
            temperature=1.0,
            distribution_modified=None,
            version_spans=(VersionSpan(version=0, start=0, end=len(turn.response_ids)),),
            hint="a hint",
            created_at=0.0,
        )
        for turn in turns
    ]


def _drawn(generator: np.random.Generator, length: int) -> np.ndarray:
    return np.minimum(generator.normal(-3.0, 1.0, length), -1e-3).astype(np.float32)


def distinct_tokens(sequences: Sequence[Ids]) -> int:
    """Nodes of the tree of these sequences: a prefix that several share counts once."""
    # Big-endian bytes sort like the ids, so the sequences that share most are next to each other.
    ordered = sorted(sequences, key=lambda ids: ids.astype(">i4").tobytes())
    before: Ids = np.empty(0, dtype=np.int32)
    count = 0
    for ids in ordered:
        count += len(ids) - common_prefix(before, ids)
        before = ids
    return count


def common_prefix(a: Ids, b: Ids) -> int:
    """How many ids both begin with."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
