"""The steps of a run on a cluster, from slime's event files into RUN/metrics.jsonl.

slime reports to TensorBoard: each process writes a file of its own in RUN/tensorboard, value by
value. Everything here that reads a run's steps reads metrics.jsonl, so a launch writes that file
too: a row for each batch, with the embedded trainer's names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from records.lessons.names import LessonKind
from rollout_bridge.rehearsal.last_line import METRICS_FILE

_HANDED_OVER = "handover/version"
"""Written first of a batch's values, by the process that takes turns from the store."""
_PREFIXES = ("train/", "rollout/")
_LAST_BATCH = "rollout/last_batch/"
"""What slime's trainer says with a batch of the one before it; such values replace those that it
gave then (trainer/slime/last_batch.py).
"""
_ALIASES = {
    "handover/staleness_mean": "staleness_mean",
    "handover/staleness_max": "staleness_max",
    "handover/turns": "turns/live",
    "perf/train_time": "seconds/step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """`batch`: slime's rollout id. `at`: seconds since the epoch."""

    batch: int
    name: str
    value: float
    at: float


@dataclass(slots=True)
class _Batch:
    """What is known of one batch; of several steps on it, sums of their values."""

    values: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    at: float = 0.0

    def add(self, one: _Value) -> None:
        self.at = max(self.at, one.at)
        if not one.name.startswith("train/"):
            self.values[one.name] = one.value
            return
        self.sums[one.name] = self.sums.get(one.name, 0.0) + one.value
        self.counts[one.name] = self.counts.get(one.name, 0) + 1

    def row(self, batch: int) -> dict[str, Any]:
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        named = {_own_name(name): one for name, one in (self.values | means).items()}
        counted = ["turns/live", *(f"lessons/{kind.value}" for kind in LessonKind)]
        is_refresh = bool(named.get("handover/is_refresh"))
        row: dict[str, Any] = {
            "step": batch + 1,
            "version": int(named["handover/version"]) if "handover/version" in named else None,
            "time": self.at,
            "skipped": "refresh" if is_refresh else None,
            # A job without rehearsal, or an empty batch, reports no lessons.
            "turns": sum(named[name] for name in counted if name in named)
            if counted[0] in named
            else None,
        }
        return row | {name: one if math.isfinite(one) else None for name, one in named.items()}


class ClusterSteps:
    """Rows for the batches of RUN, those of earlier launches included."""

    def __init__(self, run: Path) -> None:
        self._path = run / METRICS_FILE
        self._events = run / "tensorboard"
        self._files: dict[Path, _EventFile] = {}
        self._open: dict[int, _Batch] = {}
        self._written: int | None = None
        """The newest batch that has its row; None before anything was found."""
        self._to_drop: int | None = None
        """Rows after this batch are of a job that another one has replaced."""

    def update(self, *, is_end: bool = False) -> list[dict[str, Any]]:
        """Write a row for each batch that is complete: one with trained values, followed by another
        such batch or, with `is_end`, by none. The first call that finds values writes the file
        anew. Returns the new rows. Raises OSError.
        """
        values = sorted(self._new_values(), key=lambda one: one.at)
        if not values and self._written is None:
            return []  # nothing to write the file from
        for one in values:
            if one.name == _HANDED_OVER:
                # A job that resumed, or went back, does these batches again.
                self._open = {key: kept for key, kept in self._open.items() if key < one.batch}
                if self._written is not None and one.batch <= self._written:
                    self._to_drop = self._written = one.batch - 1
            if one.name.startswith(_LAST_BATCH):
                name = f"rollout/{one.name.removeprefix(_LAST_BATCH)}"
                one = replace(one, batch=one.batch - 1, name=name)
                if one.batch not in self._open:
                    continue  # a job that resumed, whose row is written
            if self._written is None or one.batch > self._written:
                self._open.setdefault(one.batch, _Batch()).add(one)
        trained = [batch for batch, found in self._open.items() if found.sums]
        if self._written is None:
            whole = self._path.with_suffix(".new")
            whole.write_text("", encoding="utf-8")
            os.replace(whole, self._path)
            self._written = -1
        if self._to_drop is not None:
            _keep_steps(self._path, self._to_drop + 1)
            self._to_drop = None
        if not trained:
            return []
        last = max(trained) if is_end else max(trained) - 1
        complete = sorted(batch for batch in self._open if batch <= last)
        rows = [self._open[batch].row(batch) for batch in complete]
        _append(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        for batch in complete:
            del self._open[batch]
        self._written = max([self._written, *complete])
        return rows

    def _new_values(self) -> Iterator[_Value]:
        for path in sorted(self._events.glob("events.out.tfevents.*")):
            if path not in self._files:
                self._files[path] = _EventFile(path)
            yield from self._files[path].new()


def _keep_steps(path: Path, last: int) -> None:
    """Only the rows up to this step; all of them or, with OSError, none are dropped."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = path.with_suffix(".new")
    kept = "".join(line for line in lines if json.loads(line)["step"] <= last)
    whole.write_text(kept, encoding="utf-8")
    os.replace(whole, path)


def _append(path: Path, lines: str) -> None:
    """All of the lines or, with OSError, none: the next attempt has them again."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError:
        os.truncate(path, size)
        raise


class _EventFile:
    """One process's file. slime's trainer numbers steps, not batches; what it says of a batch
    comes before the steps on it.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: it takes a second, and only launches need it.
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        self._loader = LegacyEventFileLoader(str(path))
        self._batch: int | None = None

    def new(self) -> Iterator[_Value]:
        for event in self._loader.Load():
            for value in event.summary.value:
                if not value.HasField("simple_value"):
                    continue
                if not value.tag.startswith("train/"):
                    self._batch = event.step
                if self._batch is not None:
                    yield _Value(
                        batch=self._batch,
                        name=value.tag,
                        value=value.simple_value,
                        at=event.wall_time,
                    )


def _own_name(name: str) -> str:
    """The embedded trainer's name of a value."""
    if name in _ALIASES:
        return _ALIASES[name]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
