"""The order of scopes: waiting turns are taken scope by scope, not by age alone.

Otherwise a tenant with a thousand waiting turns would keep a tenant with three waiting. If there
are more scopes than places, the next call continues after the scope with which this one ended
(`last_scope`, which the caller keeps). Its cost depends on how many turns are taken and from how
many scopes, not on how many there are. It does not know which turn of a scope goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    Subquery,
    bindparam,
    case,
    select,
)

from records.names import TurnState
from records.tables.models import Base, TurnRow
from records.tables.sql import table_of
from records.turns.recording import REPLAY_PRIORITY

T = TypeVar("T")
R = TypeVar("R", bound=Base)
Condition: TypeAlias = Callable[[type[TurnRow]], ColumnElement[bool]]

LIVE_PRIORITY = 0
PRIORITIES = (LIVE_PRIORITY, REPLAY_PRIORITY)
"""Turns of live agents are taken before those of recordings."""
HINT_ONLY_PRIORITY = 2
"""Live turns that can no longer train: they wait for a judge with nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The turns and the lessons that were taken, and the scope of the last of them."""

    turn_ids: list[str] = field(default_factory=list)
    lesson_ids: list[str] = field(default_factory=list)
    last_scope: str


def deal(queues: Sequence[Sequence[T]], limit: int, most_each: int | None = None) -> list[T]:
    """Up to `limit` items: the first of each queue, then the second of each, and so on; at most
    `most_each` of one queue.
    """
    depth = max((len(queue) for queue in queues), default=0)
    if most_each is not None:
        depth = min(depth, most_each)
    dealt = [queue[place] for place in range(depth) for queue in queues if place < len(queue)]
    return dealt[:limit]


def waiting_scopes(
    connection: Connection,
    state: TurnState,
    priority: int,
    is_free: Condition | None,
    after: str,
    limit: int,
) -> list[str]:
    """Up to `limit` scopes with turns in `state` that are free, starting after the scope `after`,
    around the ring of all.
    """
    return ring_of_scopes(connection, TurnRow, waiting(state, priority, is_free), after, limit)


def scope_ring(state: TurnState, priority: int) -> Subquery:
    """All scopes with turns in `state`, in order."""
    return _ring(TurnRow, waiting(state, priority, None), None)


def waiting(
    state: TurnState, priority: int, is_free: Condition | None
) -> Callable[[type[TurnRow]], Sequence[ColumnElement[bool]]]:
    """What is asked of a turn in `state`, for a ring of scopes."""

    def waits(row: type[TurnRow]) -> list[ColumnElement[bool]]:
        conditions = [row.state == state, row.priority == priority]
        return conditions if is_free is None else [*conditions, is_free(row)]

    return waits


def ring_of_scopes(
    connection: Connection,
    model: type[R],
    waits: Callable[[type[R]], Sequence[ColumnElement[bool]]],
    after: str,
    limit: int,
) -> list[str]:
    """Up to `limit` scopes that have a row which `waits`, starting after the scope `after`, around
    the ring of all. `model` has a column `scope`, which follows those of `waits` in an index.
    """
    return scopes_along(
        connection, lambda is_after: ring_statement(model, waits, is_after=is_after), after, limit
    )


def scopes_along(
    connection: Connection,
    ring_of: Callable[[bool], Select[str]],
    after: str,
    limit: int,
    **parameters: Any,
) -> list[str]:
    """Up to `limit` scopes of the statements that `ring_of` makes (`ring_statement`), from the
    scope after `after` around the ring of all; `parameters` are those of their conditions.
    """
    scopes: list[str] = []
    for start in (after, None) if after else (None,):
        if len(scopes) < limit:
            given = {} if start is None else {"after": start}
            found = connection.scalars(
                ring_of(start is not None), {"most": limit, **given, **parameters}
            )
            scopes += found
    return list(dict.fromkeys(scopes))[:limit]


def ring_statement(
    model: type[R], waits: Callable[[type[R]], Sequence[ColumnElement[bool]]], *, is_after: bool
) -> Select[str]:
    """Up to `most` scopes with a row which `waits`, those that follow the scope `after` or all: a
    statement with these parameters.
    """
    scopes = _ring(model, waits, bindparam("after") if is_after else None)
    return select(scopes.c.scope).limit(bindparam("most"))


@cache
def _row_of(model: type[Base]) -> Any:
    """The columns of a row of the ring. Made once: an alias has a copy of each column, which takes
    longer than the lookup.
    """
    return table_of(model).alias().c


def _ring(
    model: type[R],
    waits: Callable[[type[R]], Sequence[ColumnElement[bool]]],
    after: BindParameter[Any] | None,
) -> Subquery:
    row = _row_of(model)

    def next_scope(bound: Callable[[Any], ColumnElement[bool]]) -> ScalarSelect[str]:
        conditions = [*waits(row), bound(row)]
        statement = select(row.scope).where(*conditions).order_by(row.scope).limit(1)
        return statement.scalar_subquery()

    first = next_scope(lambda row: row.scope >= "" if after is None else row.scope > after)
    path = select(first.label("scope")).cte("ring", recursive=True)
    # Each step is one index lookup, however many rows the scope has.
    step = select(next_scope(lambda row: row.scope > path.c.scope)).where(path.c.scope.is_not(None))
    path = path.union_all(step)
    return select(path.c.scope).where(path.c.scope.is_not(None)).subquery()


def late_no_more() -> ColumnElement[int]:
    """The priority of a turn that does not (or no longer) wait to be judged for its hint alone:
    otherwise it would be judged again and again.
    """
    return case((TurnRow.priority == HINT_ONLY_PRIORITY, LIVE_PRIORITY), else_=TurnRow.priority)


def ceil_div(number: int, parts: int) -> int:
    """`number` in `parts` equal parts, rounded up."""
    return -(-number // parts)


def flat(groups: Iterable[Sequence[T]]) -> list[T]:
    """The items of all groups in order."""
    return [item for group in groups for item in group]
