"""Queries by which a request is linked to earlier turns: by node, by fingerprint, by session.

All are confined to one scope and return references without tokens, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    and_,
    bindparam,
    case,
    literal_column,
    or_,
    select,
    union_all,
)

from records.messages import Message
from records.names import REJUDGEABLE, TurnState
from records.tables.models import IS_SIDE_TURN, NodeRow, TurnRow
from records.tables.sql import rows_in
from records.types import TurnRef

_SCOPE, _VALUES = bindparam("scope"), bindparam("values", expanding=True)
# A condition that no index is looked up for. Without statistics SQLite takes an index that begins
# with the scope for as good as one that leads to the single turn, and reads all turns of the scope.
_IS_OF_SCOPE = (TurnRow.scope + "") == _SCOPE
_REFS: Any = select(
    TurnRow.turn_id,
    TurnRow.session_id,
    TurnRow.parent_turn_id,
    TurnRow.state,
    TurnRow.drop_reason,
    TurnRow.prompt_node_id,
    TurnRow.response_node_id,
    TurnRow.next_state.is_not(None).label("has_next_state"),
    TurnRow.created_at,
)
# Made once: to make a statement takes ten times as long as to run it.
_IN_ORDER = _REFS.where(_IS_OF_SCOPE).order_by(TurnRow.created_at, TurnRow.turn_id)
_BY_RESPONSE_NODE = _IN_ORDER.where(TurnRow.response_node_id.in_(_VALUES))
_BY_PROMPT_NODE = _IN_ORDER.where(TurnRow.prompt_node_id == bindparam("node_id"))
_BY_TURN_ID = _IN_ORDER.where(TurnRow.turn_id.in_(_VALUES))
_BY_TURN_ID_AND_FINGERPRINT = _BY_TURN_ID.where(
    TurnRow.fingerprint + "" == bindparam("fingerprint")
)
_IS_UNANSWERED = and_(
    TurnRow.next_state.is_(None),
    or_(TurnRow.state != TurnState.DROPPED, TurnRow.drop_reason.in_(sorted(REJUDGEABLE))),
)
_BY_FINGERPRINT = (
    _REFS.where(
        TurnRow.scope == _SCOPE,
        TurnRow.fingerprint == bindparam("fingerprint"),
        TurnRow.created_at >= bindparam("since"),
    )
    .order_by(
        case((TurnRow.session_id == bindparam("session_id"), 0), else_=1),
        case((_IS_UNANSWERED, 0), else_=1),
        TurnRow.created_at.desc(),
        TurnRow.turn_id,
    )
    .limit(bindparam("most"))
)
_BY_CALLS = (
    _REFS.where(
        TurnRow.scope == _SCOPE,
        TurnRow.calls_key == bindparam("calls_key"),
        TurnRow.created_at >= bindparam("since"),
    )
    .order_by(TurnRow.created_at.desc(), TurnRow.turn_id)
    .limit(bindparam("most"))
)
_SESSION_OF_NODES = (
    union_all(
        *(
            select(NodeRow.depth, TurnRow.created_at, TurnRow.session_id)
            .join(NodeRow, NodeRow.node_id == column)
            .where(column.in_(_VALUES), _IS_OF_SCOPE)
            for column in (TurnRow.response_node_id, TurnRow.prompt_node_id)
        )
    )
    .order_by(literal_column("depth").desc(), literal_column("created_at").desc())
    .limit(1)
)
_RECENT_SUMMARIES = (
    select(TurnRow.session_id, NodeRow.body)
    .join(NodeRow, NodeRow.node_id == TurnRow.response_node_id)
    .where(
        IS_SIDE_TURN,
        TurnRow.created_at >= bindparam("since"),
        TurnRow.scope == _SCOPE,
        TurnRow.drop_detail.in_(bindparam("rules", expanding=True)),
    )
    .order_by(TurnRow.created_at.desc())
    .limit(bindparam("most"))
)


def by_response_node(connection: Connection, scope: str, node_ids: Sequence[str]) -> list[TurnRef]:
    """Turns whose response is one of these nodes."""
    return _oldest_first(rows_in(connection, _BY_RESPONSE_NODE, node_ids, scope=scope))


def by_prompt_node(connection: Connection, scope: str, node_id: str) -> list[TurnRef]:
    """Turns that answered exactly this prompt: siblings and retries."""
    found = connection.execute(_BY_PROMPT_NODE, {"scope": scope, "node_id": node_id})
    return [_ref(row) for row in found]


def by_fingerprint(
    connection: Connection,
    scope: str,
    fingerprint: str,
    since: float,
    limit: int,
    session_id: str | None = None,
) -> list[TurnRef]:
    """Of the turns since `since` whose response has this fingerprint, whatever came before it, the
    `limit` that are worth comparing first: of this session, then unanswered, then recent.
    """
    wanted = {"scope": scope, "fingerprint": fingerprint, "since": since, "most": limit}
    found = connection.execute(_BY_FINGERPRINT, {**wanted, "session_id": session_id})
    refs = [_ref(row) for row in found]
    return sorted(refs, key=lambda ref: (ref.created_at, ref.turn_id))


def by_calls(
    connection: Connection, scope: str, calls_key: str, since: float, limit: int
) -> list[TurnRef]:
    """The newest `limit` turns since `since` whose calls have this key (`messages.calls_key`)."""
    wanted = {"scope": scope, "calls_key": calls_key, "since": since, "most": limit}
    return [_ref(row) for row in connection.execute(_BY_CALLS, wanted)][::-1]


def by_turn_ids(
    connection: Connection, scope: str, turn_ids: Sequence[str], fingerprint: str | None = None
) -> list[TurnRef]:
    """Those of these turns that exist in the scope, and whose response has this fingerprint."""
    if fingerprint is None:
        return _oldest_first(rows_in(connection, _BY_TURN_ID, turn_ids, scope=scope))
    statement = _BY_TURN_ID_AND_FINGERPRINT
    return _oldest_first(
        rows_in(connection, statement, turn_ids, scope=scope, fingerprint=fingerprint)
    )


def session_of_nodes(connection: Connection, scope: str, node_ids: Sequence[str]) -> str | None:
    """The session of the newest turn whose prompt or response is the deepest of these nodes."""
    found = rows_in(connection, _SESSION_OF_NODES, node_ids, scope=scope)
    return max(map(tuple, found))[2] if found else None


def recent_summaries(
    connection: Connection, scope: str, rules: Sequence[str], since: float, limit: int
) -> list[tuple[str, Message]]:
    """(session, reply) of the newest side turns since `since` that one of these rules marked."""
    wanted = {"scope": scope, "rules": rules, "since": since, "most": limit}
    found = connection.execute(_RECENT_SUMMARIES, wanted)
    return [(session_id, body) for session_id, body in found]


def _oldest_first(rows: Sequence[Row[Any]]) -> list[TurnRef]:
    return sorted((_ref(row) for row in rows), key=lambda ref: ref.created_at)


def _ref(row: Row[Any]) -> TurnRef:
    return TurnRef(**{**row._mapping, "has_next_state": bool(row._mapping["has_next_state"])})
