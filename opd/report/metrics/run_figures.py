"""A run's figures in Prometheus' form: from its store, RUN/rehearsal.jsonl and RUN/metrics.jsonl.

Read again at most once a minute, by the process that also judges; a scrape reads none of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from records.hints.types import HintStatus, RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.store import Store
from rollout_bridge.rehearsal.figures import figures
from rollout_bridge.rehearsal.journal import VersionRow, last_row
from rollout_bridge.rehearsal.last_line import METRICS_FILE, last_line

_READ_EVERY_S = 60.0
_OBEDIENCE = ("value", "low", "high", "before", "floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What was read; `step` is the newest row of metrics.jsonl."""

    turns: int
    objections: int
    hints: dict[tuple[HintStatus, RehearsalBlock | None], int]
    lessons: dict[tuple[LessonKind, LessonState], int]
    lesson_drops: dict[LessonDrop, int]
    trained: dict[str, dict[LessonKind, int]]
    judged_share: float | None
    row: VersionRow | None
    step: dict[str, Any] = field(default_factory=dict)


async def read_figures(store: Store, folder: Path) -> RunFigures:
    """The figures as they are now."""
    line, row = last_line(folder / METRICS_FILE), last_row(folder)
    measured = [] if row is None else [one.hint_id for one in row.hints]
    _, objections = await store.num_judged()
    return RunFigures(
        turns=sum((await store.counts()).values()),
        objections=objections,
        hints=await store.hint_counts(),
        lessons=await store.lesson_totals(),
        lesson_drops=await store.lesson_drops(),
        trained=await store.lessons_trained_by_hint(measured),
        judged_share=await store.judged_share(),
        row=row,
        step={} if line is None else json.loads(line),
    )


class RunCollector(Collector):
    """The figures that were read last, for a registry; nothing before."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._figures: RunFigures | None = None
        self._read_at = 0.0

    async def refresh(self) -> None:
        """Read them again, if it is time. Raises StoreUnavailable."""
        now = time.monotonic()
        if self._figures is None or now - self._read_at >= _READ_EVERY_S:
            self._read_at = now
            self._figures = await read_figures(self._store, self._folder)

    def collect(self) -> Iterable[Metric]:
        """What was not measured has no sample."""
        return [] if self._figures is None else list(_families(self._figures))


def _families(found: RunFigures) -> Iterator[Metric]:
    yield CounterMetricFamily("run_turns", "Turns recorded.", value=found.turns)
    yield CounterMetricFamily(
        "run_objections", "Turns for which the judge accepted a hint.", value=found.objections
    )
    hints = GaugeMetricFamily(
        "run_hints", "Hints, by status and why they are not rehearsed.", labels=("status", "block")
    )
    for (status, block), number in found.hints.items():
        hints.add_metric((status.value, "" if block is None else block.value), number)
    yield hints
    lessons = GaugeMetricFamily("run_lessons", "Lessons.", labels=("kind", "state"))
    for (kind, state), number in found.lessons.items():
        lessons.add_metric((kind.value, state.value), number)
    yield lessons
    drops = CounterMetricFamily("run_lessons_dropped", "Lessons dropped.", labels=("reason",))
    for reason, number in found.lesson_drops.items():
        drops.add_metric((reason.value,), number)
    yield drops
    yield from _single(
        "run_judged_share",
        "Share of the turns with a next state that were judged; missing while it keeps up.",
        found.judged_share,
    )
    staleness = GaugeMetricFamily(
        "run_staleness_versions", "Staleness of the last step's samples.", labels=("of",)
    )
    for of in ("mean", "max"):
        if (value := found.step.get(f"staleness_{of}")) is not None:
            staleness.add_metric((of,), value)
    yield staleness
    yield from _single("run_version", "Newest trained version.", found.step.get("version"))
    if found.row is not None:
        yield from _measured(found.row)
        yield _of_hints(found.row, found.trained)


def _of_hints(row: VersionRow, trained: Mapping[str, Mapping[LessonKind, int]]) -> Metric:
    """For the hints that were measured last: all hints of a run would be too many labels."""
    lessons = GaugeMetricFamily(
        "rehearsal_hint_lessons", "Lessons trained of each hint.", labels=("hint_id", "kind")
    )
    for one in row.hints:
        for kind, number in trained.get(one.hint_id, {}).items():
            lessons.add_metric((one.hint_id, kind.value), number)
    return lessons


def _measured(row: VersionRow) -> Iterator[Metric]:
    values = figures(row)
    gap = GaugeMetricFamily(
        "rehearsal_gap_nats",
        "Gap per token under the hint, mean over active hints, by the states where it is measured.",
        labels=("at",),
    )
    for at, name in (("held_back", "gap"), ("where_trained", "gap_where_trained")):
        if name in values:
            gap.add_metric((at,), values[name])
    yield gap
    of_hints = GaugeMetricFamily(
        "rehearsal_hint_gap_nats", "Gap per token under each hint.", labels=("hint_id", "status")
    )
    for one in row.hints:
        if one.gap is not None:
            of_hints.add_metric((one.hint_id, one.status.value), one.gap.value)
    yield of_hints
    done = GaugeMetricFamily(
        "rehearsal_hint_uptake",
        "Share of answers that do what a hint asks, unasked; of the start model, too.",
        labels=("hint_id", "of"),
    )
    for one in row.hints:
        for of, rate in (
            ("policy", one.done),
            ("start", one.done_start),
            ("hinted", one.done_hinted),
        ):
            if rate is not None:
                done.add_metric((one.hint_id, of), rate.rate().value)
    yield done
    obedience = GaugeMetricFamily(
        "rehearsal_obedience", "Share of open wishes done, over the last versions.", labels=("of",)
    )
    for of in _OBEDIENCE if row.pooled is not None else ():
        obedience.add_metric((of,), getattr(row.pooled, of))
    yield obedience
    yield from _single(
        "rehearsal_keep_gap_nats",
        "Gap per token to the start model at states of other kinds.",
        values.get("keep_gap"),
    )
    yield from _single("rehearsal_version", "Newest version that was measured.", row.version)


def _single(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, text, value=value)
