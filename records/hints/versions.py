"""Which versions of the policy trained on a hint, and since when: its lessons, and the turns that
it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Executable, select, true, update

from records.hints.ending import erase_deleted
from records.hints.rows import HintRow, HintSourceRow
from records.lessons.names import LessonKind, LessonState
from records.lessons.rows import LessonRow
from records.names import TurnState
from records.tables.models import SampleRow, TurnRow, VerdictRow
from records.tables.sql import chunks

_Among: TypeAlias = Callable[[Any], ColumnElement[bool]]
"""Restricts a column of hint ids."""
_CLOCKS_DIFFER_S = 3600.0
"""Hints are changed by processes whose clocks may differ so much from the trainer's."""
_HAS_HINT = VerdictRow.hint.is_not(None)
"""A turn that goes on with its reward alone teaches no hint."""


def trained(
    connection: Connection, version: int, turn_ids: Sequence[str], hint_ids: Iterable[str] = ()
) -> None:
    """Note that a step trained these turns and lessons of these hints: part of its transaction."""
    hints = set(hint_ids)
    for part in chunks(turn_ids):
        of_turns = (
            select(HintSourceRow.hint_id)
            .join(VerdictRow, VerdictRow.turn_id == HintSourceRow.turn_id)
            .where(HintSourceRow.turn_id.in_(part), _HAS_HINT)
        )
        hints.update(connection.scalars(of_turns))
    for part in chunks(sorted(hints)):
        among = HintRow.hint_id.in_(part)
        connection.execute(update(HintRow).where(among).values(num_steps=HintRow.num_steps + 1))
        connection.execute(
            update(HintRow)
            .where(among, HintRow.trained_since.is_(None))
            .values(trained_since=version)
        )
    erase_deleted(connection, turn_ids)  # one may have been deleted during the step


def changed_since(connection: Connection, at: float) -> set[str]:
    """Hints that changed since then (unix seconds), other than by a step."""
    changed = select(HintRow.hint_id).where(HintRow.updated_at > at - _CLOCKS_DIFFER_S)
    return set(connection.scalars(changed))


def of_turns(connection: Connection, turn_ids: Sequence[str]) -> set[str]:
    """Hints that came from these turns."""
    found: set[str] = set()
    for part in chunks(turn_ids):
        sources = select(HintSourceRow.hint_id).where(HintSourceRow.turn_id.in_(part))
        found.update(connection.scalars(sources.distinct()))
    return found


def recount(
    connection: Connection, is_left: Callable[[int], bool], hint_ids: Collection[str] | None
) -> None:
    """Recompute since when and in how many steps each of these hints (None: all) was trained, from
    the trained turns and lessons. `is_left` tells which versions of the policy are left: what
    others trained no longer counts.
    """
    if hint_ids is not None and not hint_ids:
        return
    if hint_ids is None:
        _recount(connection, is_left, lambda column: true())
        return
    for part in chunks(sorted(hint_ids)):
        _recount(connection, is_left, lambda column, part=part: column.in_(part))


def _recount(connection: Connection, is_left: Callable[[int], bool], among: _Among) -> None:
    taught: dict[str, set[int]] = {}
    earlier = [one for one in _of_earlier_steps(connection, among) if is_left(one[1])]
    steps = [*_of_lessons(connection, among), *_of_turns(connection, among), *earlier]
    for hint_id, version in steps:
        taught.setdefault(hint_id, set()).add(version)
    known = select(HintRow.hint_id, HintRow.trained_since, HintRow.num_steps)
    for hint_id, since, num_steps in connection.execute(known.where(among(HintRow.hint_id))).all():
        found = taught.get(hint_id, set())
        # What was trained then may have been forgotten since.
        if since is not None and is_left(since):
            found.add(since)
        now = (min(found, default=None), len(found))
        if now != (since, num_steps):
            connection.execute(
                update(HintRow)
                .where(HintRow.hint_id == hint_id)
                .values(trained_since=now[0], num_steps=now[1])
            )


def _of_lessons(connection: Connection, among: _Among) -> list[Any]:
    statement = select(LessonRow.hint_id, LessonRow.trained_version).where(
        LessonRow.state == LessonState.TRAINED,
        LessonRow.kind == LessonKind.HINT,
        LessonRow.hint_id.is_not(None),
        LessonRow.trained_version.is_not(None),
        among(LessonRow.hint_id),
    )
    return list(connection.execute(statement.distinct()))


def _of_turns(connection: Connection, among: _Among) -> list[Any]:
    statement = (
        select(HintSourceRow.hint_id, TurnRow.trained_version, TurnRow.state)
        .join(TurnRow, TurnRow.turn_id == HintSourceRow.turn_id)
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .where(TurnRow.trained_version.is_not(None), _HAS_HINT, among(HintSourceRow.hint_id))
    )
    return _trained(connection, statement.distinct())


def _of_earlier_steps(connection: Connection, among: _Among) -> list[Any]:
    """Of turns that trained more than once: every step, lost ones included."""
    statement = (
        select(HintSourceRow.hint_id, SampleRow.version, TurnRow.state)
        .join(TurnRow, TurnRow.turn_id == HintSourceRow.turn_id)
        .join(SampleRow, SampleRow.turn_id == TurnRow.turn_id)
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .where(TurnRow.times_trained > 1, _HAS_HINT, among(HintSourceRow.hint_id))
    )
    return _trained(connection, statement.distinct())


def _trained(connection: Connection, statement: Executable) -> list[Any]:
    """Hint and version of trained turns. With a condition on the state, SQLite begins with all
    trained turns.
    """
    rows = connection.execute(statement)
    return [tuple(row)[:2] for row in rows if row.state is TurnState.TRAINED]
