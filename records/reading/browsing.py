"""Sessions as people browse them: a bounded part at a time, however many there are.

A page looks at a limited number of the newest sessions and of turns in each, and says how far it
got, so that the next page begins there. Nothing is counted over the whole store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    bindparam,
    literal,
    select,
    tuple_,
    union_all,
)

from records.messages import Message
from records.names import DropReason, TurnState
from records.tables.columns import clean_text
from records.tables.models import NodeRow, SessionRow, TurnRow
from records.tables.sql import chunks

MOST_EXAMINED = 200
"""Number of sessions that one page looks at to find matching ones."""
MOST_TURNS = 200
"""Number of newest turns of a session that are looked at."""
_AT_ONCE = 25
"""Number of sessions whose turns are read by one statement."""
MOST_MESSAGES = 12
"""Number of newest messages that are read from a turn's prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which sessions are wanted: those with a turn that matches all given values, begun from
    `since` to `until` (unix seconds). `version` trained the turn or sampled some of it; `user` is
    the end user that the client named, `teacher` the teacher that the client or a route chose.
    """

    state: TurnState | None = None
    reason: DropReason | None = None
    version: int | None = None
    user: str | None = None
    teacher: str | None = None
    since: float | None = None
    until: float | None = None

    @property
    def is_of_turns(self) -> bool:
        """Whether turns have to be looked at."""
        asked = (self.state, self.reason, self.version, self.user, self.teacher)
        return any(one is not None for one in asked)

    def is_within(self, began: float) -> bool:
        """Whether a session that began then (unix seconds) is wanted."""
        return (self.since is None or began >= self.since) and (
            self.until is None or began <= self.until
        )


ASKED_OF_TURNS = (
    *(TurnRow.state, TurnRow.drop_reason, TurnRow.trained_version, TurnRow.oldest_version),
    *(TurnRow.newest_version, TurnRow.user_id, TurnRow.teacher_key),
)
"""Columns that `fits` looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a session in the order of lists."""

    created_at: float
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """A session and the states of its newest turns; `is_cut` if it has more of them. Times are unix
    seconds.
    """

    session_id: str
    scope: str
    name: str | None
    created_at: float
    last_seen: float
    close_reason: str | None
    states: dict[TurnState, int]
    reasons: dict[DropReason, int]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsPage:
    """Sessions, the newest first; `next` is where to go on, None at the end."""

    sessions: tuple[ListedSession, ...]
    num_examined: int
    next: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What is new in a turn: the messages since its parent's answer, then its own answer.
    `num_earlier` messages of its prompt are not among them.
    """

    parent_turn_id: str | None
    messages: tuple[Message, ...]
    num_earlier: int
    response: Message


def sessions_page(
    connection: Connection, scope: str | None, wanted: Wanted, after: Place | None, limit: int
) -> SessionsPage:
    """Up to `limit` matching sessions, starting after `after`; fewer if MOST_EXAMINED sessions do
    not contain so many.
    """
    rows = connection.execute(
        select(SessionRow.__table__)
        .where(*_conditions(scope, wanted, after))
        .order_by(SessionRow.created_at.desc(), SessionRow.session_id.desc())
        .limit(MOST_EXAMINED + 1)
    ).all()
    found: list[ListedSession] = []
    number = 0
    for row, turns in _with_turns(connection, rows[:MOST_EXAMINED]):
        number += 1
        if wanted.is_of_turns and not any(fits(turn, wanted) for turn in turns[:MOST_TURNS]):
            continue
        found.append(_listed(row, turns))
        if len(found) == limit:
            break
    last = rows[number - 1] if number < len(rows) else None
    return SessionsPage(
        sessions=tuple(found),
        num_examined=number,
        next=None
        if last is None
        else Place(created_at=last.created_at, session_id=last.session_id),
    )


def listed_sessions(connection: Connection, session_ids: Sequence[str]) -> dict[str, ListedSession]:
    """These sessions, by their id."""
    rows = connection.execute(
        select(SessionRow.__table__).where(SessionRow.session_id.in_(session_ids))
    ).all()
    return {row.session_id: _listed(row, turns) for row, turns in _with_turns(connection, rows)}


def _with_turns(
    connection: Connection, sessions: Sequence[Row[Any]]
) -> Iterator[tuple[Row[Any], Sequence[Any]]]:
    """Each session, and what is asked of its newest turns: up to one more than are looked at, the
    newest first. A few sessions are read together, as far as the caller goes.
    """
    for part in chunks(sessions, _AT_ONCE):
        turns: dict[str, list[Any]] = {row.session_id: [] for row in part}
        names = [*turns, *[None] * (_AT_ONCE - len(part))]
        asked = {f"session_{number}": name for number, name in enumerate(names)}
        for turn in connection.execute(_newest_of_each(), asked):
            turns[turn.session_id].append(turn)
        for row in part:
            yield row, sorted(turns[row.session_id], key=attrgetter("created_at"), reverse=True)


@cache
def _newest_of_each() -> CompoundSelect[Any]:
    """The newest turns of the sessions `session_0` and so on, each by the index of sessions."""
    parts = []
    for number in range(_AT_ONCE):
        newest = (
            select(*ASKED_OF_TURNS, TurnRow.session_id, TurnRow.created_at)
            .where(TurnRow.session_id == bindparam(f"session_{number}"))
            .order_by(TurnRow.created_at.desc())
            .limit(MOST_TURNS + 1)
            .subquery(f"newest_{number}")
        )
        parts.append(select(newest))
    return union_all(*parts)


def _conditions(
    scope: str | None, wanted: Wanted, after: Place | None
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if scope is not None:
        conditions.append(SessionRow.scope == scope)
    if wanted.since is not None:
        conditions.append(SessionRow.created_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(SessionRow.created_at <= wanted.until)
    if after is not None:
        place = tuple_(SessionRow.created_at, SessionRow.session_id)
        conditions.append(
            place < tuple_(literal(after.created_at), literal(clean_text(after.session_id)))
        )
    return conditions


def fits(turn: Any, wanted: Wanted) -> bool:
    """Whether a turn has all the values that are wanted of it; it has those of ASKED_OF_TURNS."""
    if wanted.state not in (None, turn.state) or wanted.reason not in (None, turn.drop_reason):
        return False
    if wanted.user not in (None, turn.user_id) or wanted.teacher not in (None, turn.teacher_key):
        return False
    if wanted.version in (None, turn.trained_version):
        return True
    oldest, newest = turn.oldest_version, turn.newest_version
    return oldest is not None and newest is not None and oldest <= wanted.version <= newest


def _listed(row: Row[Any], turns: Sequence[Any]) -> ListedSession:
    shown = turns[:MOST_TURNS]
    return ListedSession(
        session_id=row.session_id,
        scope=row.scope,
        name=row.external_id,
        created_at=row.created_at,
        last_seen=row.last_seen,
        close_reason=None if row.closed_at is None else row.close_reason,
        states=dict(Counter(turn.state for turn in shown)),
        reasons=dict(Counter(turn.drop_reason for turn in shown if turn.drop_reason is not None)),
        is_cut=len(turns) > MOST_TURNS,
    )


def said(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Said]:
    """What is new in each of these turns; at most MOST_MESSAGES of a turn. Those whose messages are
    gone are left out.
    """
    found: dict[str, Said] = {}
    for part in chunks(turn_ids):
        turns = connection.execute(
            select(
                TurnRow.turn_id,
                TurnRow.parent_turn_id,
                TurnRow.prompt_node_id,
                TurnRow.response_node_id,
            ).where(TurnRow.turn_id.in_(part))
        ).all()
        parents = {one.parent_turn_id for one in turns if one.parent_turn_id is not None}
        answers = {
            row.turn_id: row.response_node_id
            for row in connection.execute(
                select(TurnRow.turn_id, TurnRow.response_node_id).where(
                    TurnRow.turn_id.in_(sorted(parents))
                )
            )
        }
        nodes = _nodes(connection, {one.response_node_id for one in turns})
        for one in turns:
            stop = answers.get(one.parent_turn_id or "")
            messages: list[Message] = []
            node = nodes.get(one.prompt_node_id)
            while node is not None and node.node_id != stop and len(messages) < MOST_MESSAGES:
                messages.append(node.body)
                node = nodes.get(node.parent_id or "")
            prompt, response = nodes.get(one.prompt_node_id), nodes.get(one.response_node_id)
            if prompt is None or response is None:
                continue
            found[one.turn_id] = Said(
                parent_turn_id=one.parent_turn_id,
                messages=tuple(reversed(messages)),
                num_earlier=prompt.depth + 1 - len(messages),
                response=response.body,
            )
    return found


def _nodes(connection: Connection, leaves: set[str]) -> dict[str, Any]:
    """These nodes, and those above them as far as messages are shown."""
    walk = (
        select(NodeRow.node_id, NodeRow.parent_id, literal(0).label("step"))
        .where(NodeRow.node_id.in_(sorted(leaves)))
        .cte("walk", recursive=True)
    )
    walk = walk.union(
        select(NodeRow.node_id, NodeRow.parent_id, walk.c.step + 1)
        .join(walk, NodeRow.node_id == walk.c.parent_id)
        .where(walk.c.step < MOST_MESSAGES)
    )
    columns = (NodeRow.node_id, NodeRow.parent_id, NodeRow.depth, NodeRow.body)
    wanted = NodeRow.node_id.in_(select(walk.c.node_id))
    return {row.node_id: row for row in connection.execute(select(*columns).where(wanted))}
