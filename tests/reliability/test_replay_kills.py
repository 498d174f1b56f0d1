"""A replay that is killed in every stage and started again ends as one that nobody disturbed.

The process of the command is real, and so are its judge and its trainer; the engines stay up, as
servers do that a run does not own. What belongs to the command dies at its own fail points. In
the other stages its judge or its trainer dies at one, and the command is killed with the next of
them half started.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from opd.commands.records import verify
from opd.processes.supervisor import tail
from opd.replay.importing import is_held_out
from opd.run import config as run_config
from records.names import TurnState
from records.store import Store
from tests.contract.engine_process import embedded_engine
from tests.opd.replay.recording_files import lab_recordings
from tests.records.looking import list_turns, votes_of
from tests.reliability.forked import Forked, ForkServer
from tests.reliability.lab import MODEL
from trainer.checkpoints.checkpoint import Checkpoints

pytestmark = pytest.mark.long

YES = "It shows.\n\\boxed{1}\n[HINT_START]\nGive temperatures in Celsius.\n[HINT_END]"
NO = "It does not.\n\\boxed{-1}"
HELD_OUT = 0.3
NAMES = ("Pelin", "Tessa", "Ilm", "Karo")
PATIENCE_S = 240.0

Look = Callable[[Store], Awaitable[bool]]


async def judged_two(store: Store) -> bool:
    return (await store.replay_status()).num_judged == 2


async def scored_two(store: Store) -> bool:
    return (await store.replay_status()).num_scored == 2


async def first_step_unknown(store: Store) -> bool:
    """A checkpoint has its name, and the store does not know it."""
    assert store.config.sqlite_path is not None
    return (store.config.sqlite_path.parent / "checkpoints" / "step_000001").exists()


async def last_batch_leased(store: Store) -> bool:
    counts = await store.counts()
    return counts[TurnState.LEASED] > 0 == counts[TurnState.READY]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Where a life of the command ends. `seen`: that the child whose place it is has died there;
    None: the place is the command's own.
    """

    at: str
    seen: Look | None = None


DEATHS = (
    Death(at="import_session.uncommitted:1"),
    Death(at="import_votes.committed:3"),
    Death(at="verdict.committed:2", seen=judged_two),
    Death(at="score.committed:2", seen=scored_two),
    Death(at="commit_step.uncommitted:1", seen=first_step_unknown),
    Death(at="lease.committed:1", seen=last_batch_leased),
    Death(at="gap.measured:1"),
)


@pytest.fixture(scope="module")
def policy_url() -> Iterator[str]:
    with embedded_engine(MODEL, "--seed", "0") as url:
        yield url


class Command:
    """The command line of one replay, as often as it is started."""

    def __init__(self, server: ForkServer, folder: Path, arguments: list[str]) -> None:
        self._server, self.folder = server, folder
        self._arguments = ["replay", *arguments, "--run", str(folder)]
        self._log = folder.with_suffix(".log")

    async def start(self, fail_point: str | None = None) -> Forked:
        return await self._server.start(self._arguments, self._log, fail_point)

    async def end(self) -> None:
        """A life that nobody disturbs."""
        process = await self.start()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0, tail(self._log, 40)

    async def die(self, death: Death) -> None:
        process = await self.start(death.at)
        async with asyncio.timeout(PATIENCE_S):
            if death.seen is not None:
                await self._until(death.seen, process)
                process.send_signal(signal.SIGKILL)
                await process.wait()
            else:
                assert await process.wait() == -signal.SIGKILL, tail(self._log, 40)

    async def _until(self, seen: Look, process: Forked) -> None:
        while not (self.folder / "records.db").exists():
            await asyncio.sleep(0.05)
        config = run_config.load(self.folder / "config.toml")
        async with await Store.open(config.store) as store:
            while not await seen(store):
                # It may end by itself over a child that died before it was ready.
                is_last_look = process.returncode is not None
                await asyncio.sleep(0.05)
                assert not is_last_look or await seen(store), tail(self._log, 40)


async def what_is_there(folder: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Each turn with what a replay makes of it; the teacher's log-probs of those that have some."""
    config = run_config.load(folder / "config.toml")
    async with await Store.open(config.store) as store:
        turns = {turn.turn_id: turn for turn in await list_turns(store, limit=1000)}
        found, scores = {}, {}
        for turn_id in turns:
            [turn] = await store.turns([turn_id])
            score = await store.score_of(turn_id)
            found[turn_id] = {
                "session": turn.session_id,
                "state": turns[turn_id].state,
                "reason": turns[turn_id].drop_reason,
                "ids": (turn.prompt_ids.tolist(), turn.response_ids.tolist()),
                "hint": turn.hint,
                "votes": [vote.text for vote in await votes_of(store, turn_id)],
                "hinted": score.hinted_prompt_ids.tolist() if score is not None else None,
            }
            if score is not None:
                scores[turn_id] = score.teacher_logprobs.tolist()
    return found, scores


def trained_by(folder: Path) -> list[tuple[str, ...]]:
    """The turns of each step, along the manifests."""
    config = run_config.load(folder / "config.toml")
    chain = Checkpoints(folder / "checkpoints", str(MODEL), config.trainer.seed).open()
    return [manifest.turn_ids for manifest in chain[1:]]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def assert_alike(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    """Numbers within a thousandth; a number that is missing is missing in both."""
    missing = {name for name, value in expected.items() if value is None}
    assert {name for name, value in found.items() if value is None} == missing
    known = {name: value for name, value in found.items() if name not in missing}
    assert known == pytest.approx(
        {name: value for name, value in expected.items() if name not in missing}, rel=1e-3
    )


@pytest.mark.timeout(1800)
async def test_killed_in_every_stage_and_started_again(
    lab_engine: str, policy_url: str, tmp_path: Path
) -> None:
    assert sorted(is_held_out(name, HELD_OUT) for name in NAMES) == [False, False, False, True]
    sessions, votes = lab_recordings(tmp_path, NAMES, [YES, NO, YES])
    # A session without votes: its turns are dropped for that.
    lines = votes.read_text(encoding="utf-8").splitlines(keepends=True)
    votes.write_text("".join(line for line in lines if NAMES[-1] not in line), encoding="utf-8")
    settings = {
        "policy.url": policy_url,
        "frozen.url": lab_engine,
        "trainer.rollout_batch_size": 2,
        "trainer.tensorboard": "false",
        "replay.held_out": HELD_OUT,
        # One turn at a time, so that a death in the middle leaves some.
        "judge.loop.concurrency": 1,
        "judge.loop.claim_ttl_s": 1.0,
        "scoring.loop.concurrency": 1,
        "scoring.loop.claim_ttl_s": 1.0,
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    arguments = [str(sessions), "--votes", str(votes), *options]
    async with ForkServer() as server:
        undisturbed = Command(server, tmp_path / "undisturbed", arguments)
        await undisturbed.end()
        killed = Command(server, tmp_path / "killed", arguments)
        for death in DEATHS:
            await killed.die(death)
            assert not (killed.folder / "summary.json").exists()
        await killed.end()
    expected, expected_scores = await what_is_there(undisturbed.folder)
    found, scores = await what_is_there(killed.folder)
    assert found == expected
    assert scores == {
        turn_id: pytest.approx(values, abs=1e-4) for turn_id, values in expected_scores.items()
    }
    states = Counter(turn["state"] for turn in found.values())
    assert states == {TurnState.TRAINED: 6, TurnState.DROPPED: 6}
    steps = trained_by(killed.folder)
    assert steps == trained_by(undisturbed.folder)
    assert len(steps) == 2
    trained = Counter(turn_id for step in steps for turn_id in step)
    assert set(trained.values()) == {1}
    assert set(trained) == {
        turn_id for turn_id, turn in found.items() if turn["state"] is TurnState.TRAINED
    }
    summary, other = summary_of(killed.folder), summary_of(undisturbed.folder)
    assert summary.keys() == other.keys()
    for name in ("mode", "model", "turns", "votes", "tokens_scored", "updates", "note"):
        assert summary[name] == other[name], name
    assert summary["updates"] == len(steps)
    assert summary["import"]["turns"] == other["import"]["turns"] == len(found)
    assert summary["import"]["turns_new"] == 0
    for name, gap in other["gap"].items():
        for when, figures in gap.items():
            assert_alike(summary["gap"][name][when], figures)
    assert (await asyncio.to_thread(verify, killed.folder / "config.toml", None)).is_well
