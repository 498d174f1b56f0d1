"""`opd status` says how a run stands, by its store, its folder and its endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from api_proxy.pages.words import span
from judge.metrics import HintMetrics
from opd.cli.app import app
from opd.report.curves import training_curves
from opd.report.metrics.metrics_file import write_metrics
from opd.run import config as run_config
from opd.status.facts import Endpoint, Now, Queue, read_run
from opd.status.health import LATE_AFTER_S, SILENT_AFTER_S, findings
from records.hints.types import RehearsalBlock
from records.names import TurnState
from records.store import Store
from rollout_bridge.engine.served import STAGED_FILE, ServedFile, ServedVersion
from rollout_bridge.guard.checks import add_check
from rollout_bridge.rehearsal.journal import Journal, PooledRow
from rollout_bridge.scoring.scoring_metrics import ScoringMetrics
from rollout_bridge.stop_order import StopOrder, order_stop
from tests.records.builders import a_score, a_session, a_verdict, a_vote, turn_in
from tests.records.hints.test_memory import objected
from tests.rollout_bridge.guard.test_checks import moved
from tests.rollout_bridge.rehearsal.test_journal import a_row


def status(config_file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["status", "--run", str(config_file.parent), *options])


def in_store(config_file: Path, work: Callable[[Store], Awaitable[object]]) -> None:
    async def run() -> None:
        async with await Store.open(run_config.load(config_file).store) as store:
            await work(store)

    asyncio.run(run())


def in_use(config_file: Path) -> None:
    """A run with a judging turn, an objection, a measured version and a judge's counters."""

    async def work(store: Store) -> None:
        await objected(store, "use Celsius", scope="tenant:acme")
        await turn_in(store, TurnState.JUDGING, session_id=await a_session(store))

    in_store(config_file, work)
    folder = config_file.parent
    pooled = PooledRow(value=0.5, low=0.4, high=0.6, count=64, before=0.9, floor=0.8, passed=False)
    Journal(folder).add(a_row(7).model_copy(update={"pooled": pooled}))
    row = {"time": time.time(), "step": 7, "version": 7, "staleness_mean": 0.5, "staleness_max": 2}
    row["kl_loss"] = 0.0425
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    registry = CollectorRegistry()
    split = a_verdict("t", votes=(a_vote(0), a_vote(1), a_vote(2, score=-1, hint="")))
    HintMetrics(registry).count(split, None)
    scoring = ScoringMetrics(registry)
    scoring.count_scored([a_score("t"), a_score("t")])
    write_metrics(folder, "judge", [registry])


def test_a_run_without_records_is_one_line(config_file: Path) -> None:
    (config_file.parent / "records.db").unlink()
    result = status(config_file)
    assert result.exit_code == 2
    assert "no database at" in result.output


def test_what_is_known_is_said(config_file: Path) -> None:
    in_use(config_file)
    result = status(config_file)
    assert result.exit_code == 0, result.output
    for words in (
        "2 (0.4 per minute)",
        "1 for the judge, the oldest for",
        '"I wanted Celsius."',
        "-> use Celsius (active)",
        "votes agree in 33% of pairs",
        "18 tokens per scored turn",
        "0.0425 nats per token, at the last step",
        "samples 0.5 versions stale, at most 2",
        "open wishes done 0.50 (start 0.90, at least 0.80)",
        "open wishes are done too seldom",
        "no endpoint answers at",
    ):
        assert words in result.output


def test_a_hint_that_is_not_practised_says_why(config_file: Path) -> None:
    in_use(config_file)

    async def block(store: Store) -> None:
        [hint] = await store.hints()
        await store.set_hint_block(hint.hint_id, RehearsalBlock.NO_STATES, None)

    in_store(config_file, block)
    shown = status(config_file).output
    assert "not practised: too few recorded requests to which it applies (no_states)" in shown
    [found] = json.loads(status(config_file, "--json").output)["learned_from"]
    assert found["not_rehearsed"] == "no_states"


def test_what_the_guard_measured_is_said(config_file: Path) -> None:
    in_use(config_file)
    add_check(config_file.parent, moved(7))
    for words in (
        "1 of 2 right at version 7",
        "0.250 nats per token from the start",
        "version 6 0.125 from it",
        "gap where it trained 0.200 (start 0.700)",
    ):
        assert words in " ".join(status(config_file).output.split())
    found = json.loads(status(config_file, "--json").output)["canaries"]
    assert (found["kl_last"], found["last_good"]) == (0.125, 6)
    assert (found["gap"], found["gap_start"]) == (0.2, 0.7)
    curves = {one.title: one.series for one in training_curves(config_file.parent)}
    assert curves["Canaries: distance from the start"]["KL of the last good version to it"] == [
        0.125
    ]
    assert curves["Gap at turns that trained"] == {"policy": [0.2], "start": [0.7]}


def test_a_staged_version_is_said(config_file: Path) -> None:
    in_use(config_file)
    assert "serves nobody" not in status(config_file).output
    ServedFile(config_file.parent, STAGED_FILE).write(ServedVersion(label="8"))
    assert "staged       8: serves nobody before it passes its check" in status(config_file).output
    assert json.loads(status(config_file, "--json").output)["staged_version"] == 8


def test_json_has_the_same_and_null_for_what_is_not_measured(config_file: Path) -> None:
    in_store(config_file, lambda store: store.counts())
    found = json.loads(status(config_file, "--json").output)
    assert found["queues"]["judging"] == {"turns": 0, "oldest_s": None}
    unknown = ("accept_rate", "vote_agreement", "gap", "obedience", "training_stopped")
    for name in (*unknown, "kl_to_start", "teacher_tokens_per_scored"):
        assert found[name] is None
    assert [one["what"] for one in found["health"]] == ["the run is not running"]
    in_use(config_file)
    found = json.loads(status(config_file, "--json").output)
    assert found["vote_agreement"] == pytest.approx(1 / 3)
    assert found["learned_from"][0]["words"] == "I wanted Celsius."
    assert found["turns_per_minute"] == pytest.approx(2 / 5)


def test_turns_of_long_ago_are_no_rate(config_file: Path) -> None:
    async def work(store: Store) -> None:
        await turn_in(store, TurnState.JUDGING, session_id=await a_session(store))
        assert await store.turns_within(300.0) == 1
        assert await store.turns_within(-1.0) == 0

    in_store(config_file, work)


def test_warnings_of_the_last_hour_alone(config_file: Path) -> None:
    in_store(config_file, lambda store: store.counts())
    logs = config_file.parent / "logs"
    logs.mkdir()
    now = time.time()
    lines = [
        f"{datetime.fromtimestamp(when):%Y-%m-%d %H:%M:%S},001 WARNING opd.processes.run: {text}\n"
        for when, text in ((now - 7200, "an old one"), (now - 60, "a new one"))
    ]
    (logs / "engine_policy.log").write_text("".join(lines), encoding="utf-8")
    assert read_run(config_file).warnings == ("engine_policy: a new one",)


@pytest.fixture
def well(config_file: Path) -> Now:
    """A run that serves."""
    in_store(config_file, lambda store: store.counts())
    found = read_run(config_file)
    ready = {"status": "ok", "engine": True, "store": True, "warnings": []}
    return replace(
        found,
        figures=replace(found.figures, turns=9),
        endpoint=Endpoint(url="http://127.0.0.1:1", ready=ready),
        processes={"judge": 2.0},
    )


def test_a_run_that_is_well_has_no_finding(well: Now) -> None:
    assert findings(well) == []


def test_each_thing_that_is_wrong_has_a_remedy(well: Now) -> None:
    late = Queue(turns=5, oldest_s=LATE_AFTER_S + 1)
    dead = replace(well.endpoint, ready=None)
    cases = [
        (replace(well, why_stopped="open wishes fell"), "open wishes fell"),
        (replace(well, endpoint=dead), "no endpoint answers"),
        (
            replace(well, processes={"judge": SILENT_AFTER_S + 1}),
            "process judge has reported nothing",
        ),
        (replace(well, queues=well.queues | {TurnState.SCORING: late}), "wait for the teacher"),
        (replace(well, counted={"hint_judge_failures_in_a_row": 3.0}), "3 failures in a row"),
        (replace(well, votes=replace(well.votes, votes_neg=60)), "accepted no hint in 60 votes"),
        (replace(well, always_dropped=("every turn of key a",)), "every turn of key a"),
        (replace(well, figures=replace(well.figures, judged_share=0.2)), "only 20% of the turns"),
        (replace(well, figures=replace(well.figures, turns=0)), "no request has come yet"),
    ]
    for case, words in cases:
        [found] = findings(case)
        assert words in found.what
        assert found.remedy


def test_a_stop_is_said_with_its_reason(config_file: Path) -> None:
    in_store(config_file, lambda store: store.counts())
    order_stop(config_file.parent, StopOrder(reason="open wishes fell"))
    assert "training has stopped: open wishes fell" in status(config_file).output


def test_a_judge_that_died_is_noticed(config_file: Path) -> None:
    in_use(config_file)
    path = config_file.parent / "metrics" / "judge.prom"
    long_ago = time.time() - 600
    os.utime(path, (long_ago, long_ago))
    assert read_run(config_file).processes["judge"] >= 600
    assert "the run is not running" in status(config_file).output


def test_ages_are_in_the_unit_that_fits() -> None:
    assert [span(one) for one in (5, 125, 7300, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]
