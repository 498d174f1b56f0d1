"""A sample that takes a recorded turn's place: what of the turn it keeps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from api_proxy.config import ProxyConfig
from opd.replay.config import ReplayConfig
from opd.replay.importing import SCOPE, ImportSettings, prepare_session
from opd.replay.recordings.recorded import RecordedSession
from opd.replay.resampling import PolicyResampler, num_samples
from records.care.housekeeping import Housekeeping
from records.config import RedactionConfig, StoreConfig
from records.names import DropReason, TurnState
from records.privacy.redaction import Redactor
from records.store import Store
from records.turns.recording import RecordingKind
from records.types import TurnRecord, Verdict
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.errors import EngineUnavailable
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine
from tests.examples.shipped import MODEL
from tests.opd.replay.recording_files import read, write_lines
from tests.records.looking import list_turns

REDACTION = RedactionConfig(secrets="off", personal="off")
SETTINGS = ImportSettings(context_length=4096, held_out=0.0, renderer="ours")
TALK = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "50 F."},
    {"role": "user", "content": "In Celsius, please."},
]


@pytest.fixture
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3"))


@asynccontextmanager
async def imported(
    folder: Path, rendering: Rendering, sessions: Sequence[RecordedSession]
) -> AsyncIterator[Store]:
    """A store with these sessions, each first turn judged and given a hint."""
    redactor = Redactor(REDACTION)
    config = StoreConfig.sqlite(folder / "records.db", redaction=REDACTION)
    async with await Store.open(config) as store:
        for session in sessions:
            rows = prepare_session(session, rendering, redactor, SETTINGS, time.time()).rows
            assert rows is not None
            await store.import_session(rows)
        for judged in await store.claim(TurnState.JUDGING, owner="w", limit=99, ttl_s=60):
            hinted = Verdict(
                turn_id=judged.turn_id, votes=(), hint="Celsius.", selection="longest", judge="j"
            )
            assert await store.commit_verdict("w", hinted, None)
        yield store


def resampler_of(
    store: Store, engine: ScriptedEngine, rendering: Rendering, config: ReplayConfig | None = None
) -> PolicyResampler:
    return PolicyResampler(
        store,
        engine,
        rendering,
        config or ReplayConfig(),
        scope=SCOPE,
        batch_size=99,
        context_length=4096,
        pause_mode="retract",
        proxy=ProxyConfig(),
    )


def line(rendering: Rendering) -> Line:
    return Line(ids=[*rendering.tokenizer.encode("It is 10 C."), rendering.stop_token_ids[0]])


async def samples_in(store: Store) -> list[TurnRecord]:
    turns = await store.turns([ref.turn_id for ref in await list_turns(store, limit=99)])
    return [
        turn
        for turn in turns
        if turn.recording is not None and turn.recording.kind is RecordingKind.RESAMPLED
    ]


@pytest.mark.parametrize("value", [None, False, True])
async def test_a_sample_keeps_the_templates_switch_of_its_prompt(
    tmp_path: Path, rendering: Rendering, value: bool | None
) -> None:
    [session], _ = read(write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}]))
    turn = replace(session.turns[0], enable_thinking=value)
    engine = ScriptedEngine()
    engine.script.append(line(rendering))
    async with imported(tmp_path, rendering, [replace(session, turns=(turn,))]) as store:
        [recorded] = await store.claim(TurnState.SCORING, owner="w", limit=1, ttl_s=60)
        assert await resampler_of(store, engine, rendering).process("w", recorded)
        [sample] = await samples_in(store)
    assert engine.prompts == [rendering.with_thinking(value).prompt_ids(TALK[:1]).tolist()]
    assert sample.sampling.get("enable_thinking") is value
    assert sample.response["content"] == "It is 10 C."


async def test_a_recorded_turn_that_is_forgotten_meanwhile_gets_no_sample(
    tmp_path: Path, rendering: Rendering
) -> None:
    [session], _ = read(write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}]))
    engine = ScriptedEngine()
    engine.script.append(line(rendering))
    async with imported(tmp_path, rendering, [session]) as store:
        [recorded] = await store.claim(TurnState.SCORING, owner="w", limit=1, ttl_s=60)
        await Housekeeping(store, time.time).delete([recorded.session_id], "forget", patience_s=0.0)
        assert not await resampler_of(store, engine, rendering).process("w", recorded)
        assert await samples_in(store) == []


def attempts(folder: Path, outcomes: Mapping[str, Sequence[float | None]]) -> list[RecordedSession]:
    """Sessions that begin with a question each, with their outcomes."""
    lines = [
        {
            "messages": [{"role": "user", "content": question}, *TALK[1:]],
            "session_id": f"{question} {number}",
            **({} if outcome is None else {"outcome_reward": outcome}),
        }
        for question, of_task in outcomes.items()
        for number, outcome in enumerate(of_task)
    ]
    return read(write_lines(folder / "attempts.jsonl", lines))[0]


async def test_prompts_of_tasks_that_mostly_failed_are_answered_more_often(
    tmp_path: Path, rendering: Rendering
) -> None:
    sessions = attempts(
        tmp_path, {"Weather in Oslo?": [0.0, 0.0, 1.0], "Weather in Rome?": [1.0], "Why?": [None]}
    )
    engine = ScriptedEngine()
    engine.script += [line(rendering)] * 99
    config = ReplayConfig(mode="resample", hard_samples=4)
    async with imported(tmp_path, rendering, sessions) as store:
        resampler = resampler_of(store, engine, rendering, config)
        recorded = await store.claim(TurnState.SCORING, owner="w", limit=99, ttl_s=60)
        for turn in recorded:
            assert await resampler.process("w", turn)
        samples = await samples_in(store)
        counted = Counter(turn.messages[0]["content"] for turn in samples)
        # A third of the attempts at Oslo succeeded: 1 + 3 * 2/3 answers to each of its prompts.
        assert counted == {"Weather in Oslo?": 3 * 3, "Weather in Rome?": 1, "Why?": 1}
        assert (await store.drops())[DropReason.RESAMPLED] == len(recorded) == 5
        waiting = await store.claim(TurnState.SCORING, owner="w", limit=99, ttl_s=60)
    assert {turn.turn_id for turn in waiting} == {turn.turn_id for turn in samples}


async def test_an_interrupted_prompt_is_answered_as_often_as_planned(
    tmp_path: Path, rendering: Rendering
) -> None:
    sessions = attempts(tmp_path, {"Weather in Oslo?": [0.0]})
    engine = ScriptedEngine()
    engine.script += [line(rendering), line(rendering), EngineUnavailable("gone")]
    config = ReplayConfig(mode="resample", hard_samples=4)
    async with imported(tmp_path, rendering, sessions) as store:
        resampler = resampler_of(store, engine, rendering, config)
        [recorded] = await store.claim(TurnState.SCORING, owner="w", limit=1, ttl_s=60)
        with pytest.raises(EngineUnavailable):
            await resampler.process("w", recorded)
        assert len(await samples_in(store)) == 2
        engine.script += [line(rendering)] * 9
        assert await resampler.process("w", recorded)
        assert len(await samples_in(store)) == 4


@pytest.mark.parametrize(
    ("most", "pass_rate", "number"),
    [(1, 0.0, 1), (4, None, 1), (4, 1.0, 1), (4, 0.0, 4), (5, 0.5, 3), (4, 0.9, 1)],
)
def test_samples_of_a_prompt(most: int, pass_rate: float | None, number: int) -> None:
    assert num_samples(most, pass_rate) == number


def test_more_samples_need_a_mode_that_samples() -> None:
    with pytest.raises(ValueError, match="hard_samples needs mode = resample"):
        ReplayConfig(hard_samples=2)
