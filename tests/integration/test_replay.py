"""Recorded sessions through the real parts: what was live comes back as it was, and files of
recordings are learned from to the end.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from judge.config import JudgeConfig
from judge.votes.decision import decide
from judge.votes.recorded import recorded_ballot
from judge.worker import JudgeWorker
from opd.cli.app import app
from opd.replay.importing import ImportSettings
from opd.replay.taking_in import take_in
from opd.run import config as run_config
from records.config import StoreConfig
from records.messages import canonical_message
from records.names import TurnState
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.config import ClaimLoopConfig, RendererConfig, ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.policy_scores import PolicyScorer
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.examples.shipped import MODEL
from tests.integration.test_tokens_end_to_end import converse, door, recorded_turns
from tests.opd.replay.recording_files import AIRLINE, AIRLINE_VOTES, answered_recordings

ROOT = Path(__file__).parents[2]
JUDGE = JudgeConfig(
    base_url="http://nobody/v1", model="judge", loop=ClaimLoopConfig(poll_max_s=0.05)
)
YES = "It shows.\n\\boxed{1}\n[HINT_START]\nGive temperatures in Celsius.\n[HINT_END]"
USED = ("tau-airline-4-1", "tau-airline-12-1", "tau-airline-10-1")
"""Trained on, held out, and one that nobody judged."""
NO = "It does not.\n\\boxed{-1}"
RENDERER = RendererConfig(name="qwen3", enable_thinking=False)


async def worked(store: Store, engine: EngineClient, rendering: Rendering) -> list[TurnRecord]:
    """All turns after judge and scoring worker had them; nobody answers for the judge."""
    loop = ClaimLoopConfig(concurrency=4, poll_max_s=0.05)
    scoring = ScoringWorker(
        store,
        engine,
        rendering,
        ScoringConfig(loop=loop),
        "scorer",
        policy=PolicyScorer(engine),
    )
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(JudgeWorker(store, JUDGE, "judge").run(stop)),
        asyncio.create_task(scoring.run(stop)),
    ]
    async with asyncio.timeout(120):
        while True:
            counts = await store.counts()
            if not counts[TurnState.JUDGING] + counts[TurnState.SCORING]:
                break
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*tasks)
    return await recorded_turns(store)


async def judged(store: Store) -> None:
    """A verdict by stored votes on every turn that can have one."""
    for turn in await store.claim(TurnState.JUDGING, owner="j", limit=100, ttl_s=60):
        ballot = recorded_ballot([NO, YES, NO])
        verdict, drop = decide(turn.turn_id, ballot.votes, JUDGE, num_omitted=0)
        assert await store.commit_verdict("j", verdict, drop, turn.num_reactions)


async def advantages(store: Store, turns: list[TurnRecord]) -> list[list[float]]:
    """log q - log pi of every scored turn."""
    found = []
    for turn in turns:
        score = await store.score_of(turn.turn_id)
        if score is not None:
            found.append((score.teacher_logprobs - turn.rollout_logprobs).tolist())
    return found


def exported(folder: Path) -> Path:
    """The sessions of the run in `folder`, as its users would export them."""
    values = {
        "model": str(MODEL),
        "renderer": RENDERER.model_dump(exclude_none=True),
        "store": {"url": StoreConfig.sqlite(folder / "records.db").url},
        "judge": {"base_url": "http://nobody/v1", "model": "judge"},
    }
    run_config.save(run_config.build(values), folder / "config.toml")
    words = ["records", "export", "--config", folder / "config.toml", "--out", folder / "out"]
    done = CliRunner().invoke(app, [*map(str, words), "--what", "sessions"])
    assert done.exit_code == 0, done.output
    return folder / "out" / "sessions.jsonl"


async def test_live_sessions_come_back_with_the_same_ids_and_advantages(
    lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    async with door(lab_engine, rendering, tmp_path) as parts:
        for salt in ("a", "b"):
            await converse(parts.client, stream=True, salt=salt)
        await judged(parts.store)
        live = await worked(parts.store, parts.engine, rendering)
        before = await advantages(parts.store, live)
    path = await asyncio.to_thread(exported, tmp_path)
    async with (
        await Store.open(StoreConfig.sqlite(tmp_path / "replayed.db")) as store,
        EngineClient(lab_engine, vocab_size=rendering.vocab_size) as engine,
    ):
        settings = ImportSettings(
            context_length=32_768,
            held_out=0.0,
            renderer=renderer_fingerprint(rendering, RENDERER),
        )
        report = await take_in(store, rendering, settings, [path], [], tmp_path, lambda _: None)
        assert (report.num_new, dict(report.problems)) == (len(live), {})
        replayed = await worked(store, engine, rendering)
        after = await advantages(store, replayed)
    by_ids = {_ids(turn): turn for turn in replayed}
    assert set(by_ids) == {_ids(turn) for turn in live}
    for turn in live:
        again = by_ids[_ids(turn)]
        assert canonical(again) == canonical(turn)
        assert again.rollout_logprobs.tolist() == turn.rollout_logprobs.tolist()
        assert again.hint == turn.hint
    assert len(before) == len(after) >= 4
    for one, other in zip(sorted(before), sorted(after), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def canonical(turn: TurnRecord) -> list[dict[str, Any]]:
    return [canonical_message(message) for message in (*turn.messages, turn.response)]


def _ids(turn: TurnRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(turn.prompt_ids.tolist()), tuple(turn.response_ids.tolist())


def replay(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call the command."""
    words = ["-m", "opd.cli.app", "replay", *map(str, arguments), "--run", str(folder)]
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=290
    )


def short_recordings(folder: Path, votes: list[str]) -> list[Path]:
    """A file of four short sessions, and one with these votes on each answer."""
    sessions, judged = folder / "sessions.jsonl", folder / "votes.jsonl"
    names = ["Karo", "Milu", "Tessa", "Oren"]
    with sessions.open("w", encoding="utf-8") as file, judged.open("w", encoding="utf-8") as other:
        for name in names:
            messages = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": f"What is the weather in {name}?"},
                {"role": "assistant", "content": f"It is 70 F in {name}."},
                {"role": "user", "content": "Please always use Celsius."},
            ]
            line = {"session_id": name, "messages": messages, "tools": TOOLS}
            file.write(json.dumps(line) + "\n")
            line = {"session_id": name, "message_index": 2, "votes": votes}
            other.write(json.dumps(line) + "\n")
    return [sessions, judged]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.learning
@pytest.mark.timeout(600)
def test_recordings_are_learned_from_to_the_end(tmp_path: Path) -> None:
    folder, sessions = tmp_path / "run", tmp_path / "sessions.jsonl"
    lines = AIRLINE.read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = [line for line in lines if json.loads(line)["session_id"] in USED]
    sessions.write_text("".join(chosen), encoding="utf-8")
    settings = (
        "trainer.rollout_batch_size=4",
        "trainer.learning_rate=1e-5",
        # Exact: one step by sampled tokens alone may go either way, and a long one too far.
        "trainer.objective.name=topk_tail_reverse_kl",
        "trainer.objective.topk=8",
        "trainer.beta_kl=0.0",
        "scoring.top_k=8",
        "replay.held_out=0.5",
    )
    options = [word for one in settings for word in ("--set", one)]
    done = replay(folder, sessions, "--votes", AIRLINE_VOTES, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(folder)
    turns = summary["turns"]
    assert summary["import"]["rendered_share"] == 1.0
    assert summary["import"]["formats"] == {"openai-chat": len(USED)}
    assert turns["scored"] == turns["accepted"] == turns["trained"] + turns["held_out"]
    assert turns["held_out"] > 0
    assert summary["updates"] == 1, (
        "one session is left to train on, and batches hold whole sessions"
    )
    assert turns["dropped"]["no_recorded_votes"] > 0
    assert turns["judged"] == summary["import"]["turns_with_votes"]
    gap = summary["gap"]
    assert gap["trained"]["after"]["reverse_kl"] < gap["trained"]["before"]["reverse_kl"]
    assert gap["held_out"]["after"]["num_tokens"] == gap["held_out"]["before"]["num_tokens"] > 0
    last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["turns/recorded"] > 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "held_out" in page
    assert f"<td>{USED[0]}</td>" in page, "the hints are shown"
    # Once more: everything is done already, and nothing is done twice.
    again = replay(folder, sessions, "--votes", AIRLINE_VOTES, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    repeated = summary_of(folder)
    assert repeated["turns"] == turns
    assert repeated["updates"] == summary["updates"]
    assert repeated["import"]["turns_new"] == 0


@pytest.mark.long
def test_the_policy_answers_recorded_prompts_anew(tmp_path: Path) -> None:
    sessions, votes = short_recordings(tmp_path, [YES, NO, YES])
    options = ["--set", "trainer.rollout_batch_size=2", "--set", "replay.held_out=0.0"]
    options += ["--set", "replay.max_new_tokens=32"]
    folder = tmp_path / "run"
    done = replay(folder, sessions, "--votes", votes, "--mode", "resample", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(folder)
    turns = summary["turns"]
    assert turns["resampled"] == turns["dropped"]["resampled"] == turns["accepted"] == 4
    assert (turns["trained"], summary["updates"]) == (4, 2)
    assert summary["note"] is None, "the policy's own samples say how probable they were"


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["rescore", "resample"])
def test_a_replay_ends_with_the_last_step_that_it_may_take(mode: str, tmp_path: Path) -> None:
    sessions, votes = short_recordings(tmp_path, [YES, NO, YES])
    settings = ("trainer.rollout_batch_size=1", "trainer.max_steps=1", "replay.held_out=0.0")
    options = [word for one in settings for word in ("--set", one)]
    done = replay(tmp_path / "run", sessions, "--votes", votes, "--mode", mode, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["turns"]["trained"], summary["updates"]) == (1, 1)
    said = " ".join(done.stdout.split())
    assert "3 turns are left: the trainer has taken its last step (trainer.max_steps = 1)" in said


@pytest.mark.learning
@pytest.mark.timeout(400)
def test_hints_of_recordings_are_practised_until_they_rest(tmp_path: Path) -> None:
    names = ["Karo", "Milu", "Tessa", "Oren", "Lima", "Vora", "Pella", "Sunti"]
    sessions, votes = answered_recordings(tmp_path, names, call=[NO] * 3, answer=[YES] * 3)
    settings = (
        "rehearsal.prompt_samples=4",
        "rehearsal.start_samples=16",
        "rehearsal.obedience_samples=16",
        "rehearsal.gap_samples=8",
        "rehearsal.keep_samples=4",
        "rehearsal.obedience_floor=0.5",
    )
    options = [word for one in settings for word in ("--set", one)]
    done = replay(tmp_path / "run", sessions, "--votes", votes, "--rehearse", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["turns"]["trained"] + summary["turns"]["held_out"] == len(names)
    learning = summary["learning"]
    [hint] = learning["hints"]
    assert hint["status"] == "resting"
    assert sum(learning["steps"]["lessons"].values()) > 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Give temperatures in Celsius." in page
    # Once more: what rests is not practised again.
    again = replay(tmp_path / "run", sessions, "--votes", votes, "--rehearse", *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert summary_of(tmp_path / "run")["updates"] == summary["updates"]


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    sessions, votes = short_recordings(tmp_path, [NO, NO, NO])
    done = replay(tmp_path / "run", sessions, "--votes", votes)
    assert done.returncode == 2
    assert "no recorded turn could be trained on" in done.stderr
    assert summary_of(tmp_path / "run")["turns"]["trained"] == 0


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    done = replay(tmp_path / "run", tmp_path / "nothing.jsonl")
    assert done.returncode == 2
    assert "nothing.jsonl: no such file or folder" in done.stderr
    done = replay(tmp_path / "run", AIRLINE, "--mode", "guess")
    assert done.returncode == 2
    assert "--mode guess: choose one of rescore, resample, judge-only" in done.stderr
