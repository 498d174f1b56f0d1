"""Whether a run learns, as the tables and curves of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from api_proxy.pages.measured import Curve
from opd.rehearsal.saying import MEASURED_WHERE_IT_TRAINS, MOST_HINTS, HintFigures
from records.hints.types import Hint, HintStatus, RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.reading.drop_words import BLOCK_WORDS, LESSON_WORDS
from rollout_bridge.rehearsal.journal import VersionRow, measured_of, read_rows, uptake_of

_SHOWN = 50
_CURVES = 8
_SHORT = 60


class LearningStore(HintFigures, Protocol):
    """What is needed of the store."""

    async def hint_counts(self) -> dict[tuple[HintStatus, RehearsalBlock | None], int]: ...
    async def hint_rules(self) -> dict[bool | None, int]: ...
    async def lesson_counts(self) -> dict[tuple[LessonKind, LessonState], int]: ...
    async def lesson_drops(self) -> dict[LessonDrop, int]: ...
    async def lessons_trained_by_hint(self) -> dict[str, dict[LessonKind, int]]: ...


async def learning_tables(
    store: LearningStore, folder: Path
) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """The hints, newest first, their numbers by status, and the lessons; no tables for a run
    without hints.
    """
    hints = await store.hints(limit=MOST_HINTS)
    if not hints:
        return []
    trained, where = await store.lessons_trained_by_hint(), _measured_where_trained(folder)
    title = "Hints" if len(hints) <= _SHOWN else f"Hints: the newest {_SHOWN} of {len(hints)}"
    header = ("hint", "status", "why", "confirmed", "steps", "lessons", "counter-lessons")
    header = (*header, "since version", "gap first", "gap")
    return [
        (
            title,
            header,
            [
                _hint_cells(hint, trained.get(hint.hint_id, {}), hint.hint_id in where)
                for hint in hints[:_SHOWN]
            ],
        ),
        (
            "Hints, by status and why they are not practised",
            ("status", "not practised", "hints", "why"),
            _count_cells(await store.hint_counts()),
        ),
        (
            "Hints, by the judge's answer to whether each is a rule",
            ("a rule", "hints"),
            _rule_cells(await store.hint_rules()),
        ),
        (
            "Lessons on their way",
            ("kind", "state", "lessons"),
            _cells(await store.lesson_counts()),
        ),
        (
            "Lessons dropped, by reason",
            ("reason", "lessons", "why"),
            [
                (reason.value, str(n), LESSON_WORDS[reason])
                for reason, n in (await store.lesson_drops()).items()
            ],
        ),
    ]


def _measured_where_trained(folder: Path) -> set[str]:
    """Hints with too few states to hold some back, at their last measurement."""
    held = {one.hint_id: one.held_back for row in read_rows(folder) for one in row.hints}
    return {hint_id for hint_id, is_held_back in held.items() if not is_held_back}


def _count_cells(
    counts: Mapping[tuple[HintStatus, RehearsalBlock | None], int],
) -> list[Sequence[str]]:
    return [
        (status.value, block.value if block else "", str(n), BLOCK_WORDS[block] if block else "")
        for (status, block), n in counts.items()
    ]


def _rule_cells(rules: Mapping[bool | None, int]) -> list[Sequence[str]]:
    answers = ((True, "yes"), (False, "no"), (None, "not asked yet"))
    return [(word, str(rules.get(answer, 0))) for answer, word in answers]


def learning_curves(folder: Path) -> list[Curve]:
    """What was measured, version by version."""
    rows = read_rows(folder)
    if not rows:
        return []
    versions = [row.version for row in rows]
    pooled = [row.pooled for row in rows]
    of_pooled = {
        label: [None if one is None else getattr(one, name) for one in pooled]
        for label, name in (
            ("done", "value"),
            ("95% interval, low", "low"),
            ("95% interval, high", "high"),
            ("at least", "floor"),
        )
    }
    keep = [None if row.keep is None else row.keep.value for row in rows]
    plots = [
        (
            "Objections per 100 turns",
            "",
            {"objections": objections_per_100(rows)},
            "How often users object. Healthy: it falls as their wishes are learned.",
        ),
        (
            "Gap under each hint",
            "nats",
            _gaps(rows),
            "How much of each hint is left to learn, on requests that never train. Healthy: it "
            "falls towards 0, and the hint rests.",
        ),
        (
            "Uptake: what each hint asks, done unasked",
            "share",
            _uptakes(rows),
            "How often the policy does what a hint asks without being asked to, on requests that "
            "never train. Healthy: it rises to what the start model does with the hint, which is "
            "drawn too.",
        ),
        (
            "Obedience: open wishes done",
            "share",
            of_pooled,
            "How often the policy still does the opposite of what it learned when it is openly "
            "asked to. Healthy: as high as at the start; training stops below the floor.",
        ),
        (
            "Open wishes done, by the hint that they are against",
            "share",
            _done(rows),
            "The same, hint by hint. Healthy: high.",
        ),
        (
            "Gap to the start at states of other kinds",
            "nats",
            {"mean": keep},
            "How far the policy has moved where nobody objected. Healthy: near 0.",
        ),
    ]
    return [
        Curve(title=title, unit=unit, steps=versions, series=series, step_unit="version", says=says)
        for title, unit, series, says in plots
    ]


def objections_per_100(rows: Sequence[VersionRow]) -> list[float | None]:
    """Among the turns between each version and the one before; None if there was no turn."""
    found: list[float | None] = []
    turns = objections = 0
    for row in rows:
        new = row.turns - turns
        found.append(100 * (row.objections - objections) / new if new > 0 else None)
        turns, objections = row.turns, row.objections
    return found


def _gaps(rows: Sequence[VersionRow]) -> dict[str, Sequence[float | None]]:
    """The gaps of the hints that were measured last."""
    names = list(dict.fromkeys(one.hint_id for row in reversed(rows) for one in row.hints))
    by_version = [
        {one.hint_id: one.gap.value for one in row.hints if one.gap is not None} for row in rows
    ]
    return {_short(name): [gaps.get(name) for gaps in by_version] for name in names[:_CURVES]}


def _uptakes(rows: Sequence[VersionRow]) -> dict[str, Sequence[float | None]]:
    """The uptake of the hints that were measured last, each with that of the hinted start."""
    names = list(dict.fromkeys(one.hint_id for row in reversed(rows) for one in row.hints))
    found: dict[str, Sequence[float | None]] = {}
    for name in names[: _CURVES // 2]:
        of_rows = [uptake_of(measured_of(name, [row])) for row in rows]
        if any(of_rows):
            found[_short(name)] = [one and one.now.value for one in of_rows]
            found[f"{_short(name)}, start with the hint"] = [
                one and one.hinted.value for one in of_rows
            ]
    return found


def _done(rows: Sequence[VersionRow]) -> dict[str, Sequence[float | None]]:
    """The obedience of the hints that were asked about last."""
    names = list(dict.fromkeys(name for row in reversed(rows) for name in row.obedience_of))
    by_version = [
        {name: one.followed / one.asked for name, one in row.obedience_of.items() if one.asked}
        for row in rows
    ]
    return {_short(name): [done.get(name) for done in by_version] for name in names[:_CURVES]}


def _short(hint_id: str) -> str:
    """Enough of the id to find it: all begin alike."""
    return hint_id.removeprefix("hint_")[:8]


def _hint_cells(
    hint: Hint, trained: Mapping[LessonKind, int], measured_where_trained: bool
) -> Sequence[str]:
    why = hint.block.value if hint.block is not None else ""
    where = f" ({MEASURED_WHERE_IT_TRAINS})" if measured_where_trained else ""
    text = hint.text if len(hint.text) <= _SHORT else f"{hint.text[:_SHORT]}..."
    return (
        f"{_short(hint.hint_id)} {text}",
        hint.status.value,
        ": ".join(one for one in (why, hint.detail or "") if one),
        str(hint.num_confirmed),
        str(hint.num_steps),
        str(trained.get(LessonKind.HINT, 0)),
        str(trained.get(LessonKind.COUNTER, 0)),
        "" if hint.trained_since is None else str(hint.trained_since),
        "" if hint.first_gap is None else f"{hint.first_gap:.3g}",
        "" if hint.gap is None else f"{hint.gap:.3g}{where}",
    )


def _cells(counts: Mapping[tuple[LessonKind, LessonState], int]) -> list[Sequence[str]]:
    return [(kind.value, state.value, str(n)) for (kind, state), n in counts.items()]
