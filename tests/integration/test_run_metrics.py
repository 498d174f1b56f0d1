"""`/metrics` of the endpoint shows what all processes of a run count."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from opd.report.metrics.metrics_file import write_metrics
from opd.report.metrics.run_figures import RunCollector
from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.defaults import resolve, single_machine
from opd.run.recipe import recipe
from records.hints.types import Examination, HintStatus
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.store import Store
from rollout_bridge.engine.keys import ensure_key_file
from rollout_bridge.rehearsal.journal import Journal, MeasuredHint, PooledRow, RateRow
from tests.examples.shipped import MODEL
from tests.records.hints.test_memory import objected
from tests.rollout_bridge.rehearsal.test_journal import GAP, a_row

POOLED = PooledRow(value=0.9, low=0.8, high=0.95, count=64, before=0.98, floor=0.93, passed=True)


def samples_of(text: str) -> dict[str, float]:
    """By name and labels; a family that stands twice, or what no scraper could read, fails."""
    found: dict[str, float] = {}
    names: list[str] = []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for one in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    assert len(names) == len(set(names))
    return found


def configured(folder: Path) -> RunConfig:
    values = {**single_machine(str(MODEL), folder), "made_by": "serve"}
    config = resolve(values, None, ["proxy.port=0"], None, recipe)
    run_config.save(config, folder / "config.toml")
    ensure_key_file(folder / "engine.key")
    return config


def a_hint_row(name: str, gap: float, *, held_back: bool) -> MeasuredHint:
    return MeasuredHint(
        hint_id=name,
        status=HintStatus.ACTIVE,
        gap=GAP.model_copy(update={"value": gap}),
        first_gap=1.0,
        held_back=held_back,
        num_steps=1,
        active_from=0,
        done=RateRow(hits=4, count=16),
        done_start=RateRow(hits=3, count=48),
    )


async def fill(folder: Path, config: RunConfig) -> None:
    """A hint, a step and a measured version."""
    async with await Store.open(config.store) as store:
        await objected(store, "use Celsius")
        [hint] = await store.claim_hints(owner="examiner", limit=1, ttl_s=60)
        found = Examination(hint_id=hint.hint_id, is_rule=True)
        assert await store.commit_examination("examiner", found)
    hints = (
        a_hint_row("a", 0.2, held_back=True),
        a_hint_row("b", 0.4, held_back=True),
        a_hint_row("c", 0.8, held_back=False),
    )
    Journal(folder).add(a_row(3).model_copy(update={"pooled": POOLED, "hints": hints}))
    step = {"step": 3, "version": 3, "staleness_mean": 0.5, "staleness_max": 2}
    (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")


@contextlib.contextmanager
def started(command: str, folder: Path) -> Iterator[None]:
    argv = [sys.executable, "-m", "opd.cli.app", command, "--run", str(folder)]
    with (folder / f"{command}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.timeout(120)
async def test_a_scrape_of_the_endpoint_shows_judge_rehearsal_and_training(tmp_path: Path) -> None:
    config = configured(tmp_path)
    await fill(tmp_path, config)
    url = f"http://127.0.0.1:{config.proxy.port}/metrics"
    with started("proxy", tmp_path), started("judge", tmp_path):
        async with httpx.AsyncClient() as client, asyncio.timeout(90):
            while True:
                await asyncio.sleep(0.1)
                with contextlib.suppress(httpx.TransportError):
                    text = (await client.get(url)).text
                    if "run_turns_total" in text:
                        break
    found = samples_of(text)
    assert found["opd_in_flight"] == 0
    assert found["hint_turns_total"] == 0
    assert found["teacher_scored_total"] == 0
    assert "hint_question_total" in text
    assert found["opd_process_metrics_age_seconds{process=judge}"] < 60
    assert found["run_turns_total"] == found["run_objections_total"] == 1
    assert found["run_hints{block=,status=active}"] == 1
    assert found["rehearsal_gap_nats{at=held_back}"] == pytest.approx(0.3)
    assert found["rehearsal_gap_nats{at=where_trained}"] == 0.8
    for of in ("value", "low", "high", "before", "floor"):
        assert found[f"rehearsal_obedience{{of={of}}}"] == getattr(POOLED, of)
    assert found["rehearsal_hint_uptake{hint_id=a,of=policy}"] == 0.25
    assert found["rehearsal_hint_uptake{hint_id=a,of=start}"] == 0.0625
    assert "rehearsal_hint_uptake{hint_id=a,of=hinted}" not in found, "it was not measured"
    assert found["rehearsal_keep_gap_nats"] == 0.5
    assert found["run_staleness_versions{of=mean}"] == 0.5
    assert found["run_version"] == 3


async def test_what_was_not_measured_has_no_sample(tmp_path: Path) -> None:
    async with await Store.open(configured(tmp_path).store) as store:
        registry, run = CollectorRegistry(), RunCollector(store, tmp_path)
        registry.register(run)
        write_metrics(tmp_path, "judge", [registry])
        assert (tmp_path / "metrics" / "judge.prom").read_bytes() == b"", "nothing was read yet"
        await run.refresh()
        write_metrics(tmp_path, "judge", [registry])
    found = samples_of((tmp_path / "metrics" / "judge.prom").read_text())
    assert found == {"run_turns_total": 0, "run_objections_total": 0}


async def test_lessons_are_shown_by_kind_state_and_reason(tmp_path: Path) -> None:
    found = {
        (LessonKind.HINT, LessonState.TRAINED): 9,
        (LessonKind.KEEP, LessonState.READY): 4,
    }
    async with await Store.open(configured(tmp_path).store) as store:
        run = RunCollector(store, tmp_path)
        await run.refresh()
        assert run._figures is not None
        object.__setattr__(run._figures, "lessons", found)
        object.__setattr__(run._figures, "lesson_drops", {LessonDrop.STALE: 3})
        registry = CollectorRegistry()
        registry.register(run)
        write_metrics(tmp_path, "judge", [registry])
    shown = samples_of((tmp_path / "metrics" / "judge.prom").read_text())
    assert shown["run_lessons{kind=hint,state=trained}"] == 9
    assert shown["run_lessons_dropped_total{reason=stale}"] == 3
