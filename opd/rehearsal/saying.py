"""Whether a run learns, as a line of a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from records.hints.types import Hint, HintStatus
from records.lessons.names import LessonKind, LessonState
from rollout_bridge.rehearsal.estimates import summed
from rollout_bridge.rehearsal.journal import (
    ObedienceRow,
    VersionRow,
    last_row,
    measured_of,
    uptake_of,
)
from rollout_bridge.rehearsal.last_line import METRICS_FILE, last_line
from rollout_bridge.stop_order import read_stop

MOST_HINTS = 1000
_SHOWN_HINTS = 3
_MOST_CHARS = 60
MEASURED_WHERE_IT_TRAINS = "measured where it trains: fewer than four states"


class HintFigures(Protocol):
    """What is needed of the store."""

    async def hints(
        self,
        *,
        scope: str | None = None,
        statuses: Sequence[HintStatus] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Hint]: ...


class ProgressStore(HintFigures, Protocol):
    """What is needed of the store, once a minute."""

    async def num_judged(self) -> tuple[int, int]: ...
    async def lesson_totals(self) -> dict[tuple[LessonKind, LessonState], int]: ...
    async def lessons_trained_by_hint(
        self, hint_ids: Sequence[str] | None = None
    ) -> dict[str, dict[LessonKind, int]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Shown along with hints and measurements: `objections` per 100 judged turns since the line
    before, hint-lessons trained, and staleness (mean, most) of the last step; None: nothing to
    show.
    """

    objections: float | None = None
    lessons: int | None = None
    staleness: tuple[float, float] | None = None


class LearningLine:
    """Says now and then whether a run learns."""

    def __init__(self, store: ProgressStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._judged = self._objections = 0

    async def said(self) -> str | None:
        """Where the hints stand and what is measured; None while there is neither. Begins with why
        training has stopped, if it has.
        """
        hints = await self._store.hints(limit=MOST_HINTS)
        order = read_stop(self._folder)
        row = last_row(self._folder)
        said = shown_learning(hints, row, await self._progress())
        active = [one.hint_id for one in practised_hints(hints)[:_SHOWN_HINTS]]
        trained = await self._store.lessons_trained_by_hint(active)
        practised = shown_hints(hints, trained, row)
        said = "\n".join([said, *practised]) if said else said
        if order is not None and order.reason:
            return f"training has stopped: {order.reason}" + (f"\n{said}" if said else "")
        return said

    async def _progress(self) -> Progress:
        judged, objections = await self._store.num_judged()
        new, found = judged - self._judged, objections - self._objections
        self._judged, self._objections = judged, objections
        lessons = (await self._store.lesson_totals()).get((LessonKind.HINT, LessonState.TRAINED))
        return Progress(
            objections=100 * found / new if new > 0 else None,
            lessons=lessons,
            staleness=_staleness(self._folder),
        )


def _staleness(folder: Path) -> tuple[float, float] | None:
    line = last_line(folder / METRICS_FILE)
    row: dict[str, Any] = {} if line is None else json.loads(line)
    mean, most = row.get("staleness_mean"), row.get("staleness_max")
    return None if mean is None or most is None else (mean, most)


def shown_learning(
    hints: Sequence[Hint], row: VersionRow | None, progress: Progress | None = None
) -> str | None:
    """The line; None if there is nothing to show."""
    if not hints and row is None:
        return None
    by_status = Counter(
        "not practised" if hint.status is HintStatus.ACTIVE and hint.block else hint.status.value
        for hint in hints
    )
    parts = [f"hints: {', '.join(f'{n} {name}' for name, n in by_status.items())}"] if hints else []
    gaps = [(h.first_gap, h.gap) for h in hints if h.first_gap is not None and h.gap is not None]
    if gaps:
        first, now = (sum(values) / len(gaps) for values in zip(*gaps, strict=True))
        parts.append(f"gap {first:.2g} -> {now:.2g} nats")
    parts += [] if row is None else _measured(row)
    parts += [] if progress is None else _progressed(progress)
    return "; ".join(parts)


def practised_hints(hints: Sequence[Hint]) -> list[Hint]:
    """Those that are being practised, in the same order."""
    return [one for one in hints if one.status is HintStatus.ACTIVE and one.first_gap is not None]


def shown_hints(
    hints: Sequence[Hint],
    trained: Mapping[str, Mapping[LessonKind, int]],
    row: VersionRow | None = None,
) -> list[str]:
    """A line for each of the newest hints that are being practised: its text, its lessons so far,
    its gap, and its uptake.
    """
    active = practised_hints(hints)
    lines = [_shown_hint(one, trained.get(one.hint_id, {}), row) for one in active[:_SHOWN_HINTS]]
    left = len(active) - len(lines)
    return [*lines, f"  and {left} more: opd hints list"] if left else lines


def _shown_hint(hint: Hint, trained: Mapping[LessonKind, int], row: VersionRow | None) -> str:
    text = " ".join(hint.text.split())
    text = text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}…"
    lessons, counter = (trained.get(one, 0) for one in (LessonKind.HINT, LessonKind.COUNTER))
    gap = "" if hint.gap is None else f", gap {hint.first_gap:.2g} -> {hint.gap:.2g} nats"
    done = shown_uptake(hint.hint_id, row)
    done = "" if done is None else f", {done}"
    return f'  practised: "{text}": {lessons} lessons and {counter} counter-lessons{gap}{done}'


def shown_uptake(hint_id: str, row: VersionRow | None) -> str | None:
    """How often what a hint asks is done unasked, as it was measured last; None if it was not."""
    found = None if row is None else uptake_of(measured_of(hint_id, [row]))
    if found is None:
        return None
    now, start, hinted = found.now, found.start, found.hinted
    return (
        f"done unasked in {now.hits} of {now.count} answers (start {start.value:.2f}, with the "
        f"hint {hinted.value:.2f})"
    )


def _measured(row: VersionRow) -> list[str]:
    parts: list[str] = []
    if row.pooled is not None:
        parts.append(f"open wishes done {row.pooled.value:.2f} (start {row.pooled.before:.2f})")
    parts += unguarded(list(row.unguarded_of.values()), len(row.unmeasured))
    if row.keep is not None:
        parts.append(f"other states {row.keep.value:.2g} nats from the start")
    return parts


def unguarded(found: Sequence[ObedienceRow], num_unmeasured: int) -> list[str]:
    """What `rehearsal.without_counter` practises without a guard: what it cost, if that can be
    measured.
    """
    one = summed([row.obedience() for row in found])
    parts: list[str] = []
    if one is not None and one.asked:
        done, before = one.followed / one.asked, one.before / one.asked
        parts.append(f"open wishes done {done:.2f} (start {before:.2f}), not guarded")
    if num_unmeasured:
        of = "" if num_unmeasured == 1 and not parts else f" of {num_unmeasured} hints"
        parts.append(f"obedience{of} cannot be measured: no usable open wish")
    return parts


def _progressed(found: Progress) -> list[str]:
    parts: list[str] = []
    if found.objections is not None:
        parts.append(f"{found.objections:.0f} objections per 100 turns")
    if found.lessons:
        parts.append(f"{found.lessons} lessons of hints trained")
    if found.staleness is not None:
        mean, most = found.staleness
        parts.append(f"last step {mean:.1f} versions stale (at most {most:.0f})")
    return parts
