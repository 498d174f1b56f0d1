"""Queries by which a request is linked to earlier turns: by node, by fingerprint, by session.

All are confined to one scope and return references without tokens, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    literal_column,
    or_,
    select,
    true,
    union_all,
)

from records.messages import Message
from records.names import REJUDGEABLE, TurnState
from records.tables.models import IS_SIDE_TURN, NodeRow, TurnRow
from records.tables.sql import chunks
from records.types import TurnRef


def by_response_node(connection: Connection, scope: str, node_ids: Sequence[str]) -> list[TurnRef]:
    """Turns whose response is one of these nodes."""
    refs: list[TurnRef] = []
    for part in chunks(node_ids):
        refs += _refs(connection, _is_of(scope), TurnRow.response_node_id.in_(part))
    return sorted(refs, key=lambda ref: ref.created_at)


def by_prompt_node(connection: Connection, scope: str, node_id: str) -> list[TurnRef]:
    """Turns that answered exactly this prompt: siblings and retries."""
    return _refs(connection, _is_of(scope), TurnRow.prompt_node_id == node_id)


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
    is_elsewhere = case((TurnRow.session_id == session_id, 0), else_=1)
    is_unanswered = and_(
        TurnRow.next_state.is_(None),
        or_(TurnRow.state != TurnState.DROPPED, TurnRow.drop_reason.in_(sorted(REJUDGEABLE))),
    )
    statement = (
        _ref_columns()
        .where(
            TurnRow.scope == scope,
            TurnRow.fingerprint == fingerprint,
            TurnRow.created_at >= since,
        )
        .order_by(
            is_elsewhere,
            case((is_unanswered, 0), else_=1),
            TurnRow.created_at.desc(),
            TurnRow.turn_id,
        )
        .limit(limit)
    )
    refs = [_ref(row) for row in connection.execute(statement)]
    return sorted(refs, key=lambda ref: (ref.created_at, ref.turn_id))


def by_calls(
    connection: Connection, scope: str, calls_key: str, since: float, limit: int
) -> list[TurnRef]:
    """The newest `limit` turns since `since` whose calls have this key (`messages.calls_key`)."""
    statement = (
        _ref_columns()
        .where(TurnRow.scope == scope, TurnRow.calls_key == calls_key, TurnRow.created_at >= since)
        .order_by(TurnRow.created_at.desc(), TurnRow.turn_id)
        .limit(limit)
    )
    return [_ref(row) for row in connection.execute(statement)][::-1]


def by_turn_ids(
    connection: Connection, scope: str, turn_ids: Sequence[str], fingerprint: str | None = None
) -> list[TurnRef]:
    """Those of these turns that exist in the scope, and whose response has this fingerprint."""
    refs: list[TurnRef] = []
    same = true() if fingerprint is None else TurnRow.fingerprint + "" == fingerprint
    for part in chunks(turn_ids):
        refs += _refs(connection, _is_of(scope), same, TurnRow.turn_id.in_(part))
    return sorted(refs, key=lambda ref: ref.created_at)


def session_of_nodes(connection: Connection, scope: str, node_ids: Sequence[str]) -> str | None:
    """The session of the newest turn whose prompt or response is the deepest of these nodes."""
    found: list[tuple[Any, ...]] = []
    for part in chunks(node_ids):
        branches = [
            select(NodeRow.depth, TurnRow.created_at, TurnRow.session_id)
            .join(NodeRow, NodeRow.node_id == column)
            .where(column.in_(part), _is_of(scope))
            for column in (TurnRow.response_node_id, TurnRow.prompt_node_id)
        ]
        deepest = (
            union_all(*branches)
            .order_by(literal_column("depth").desc(), literal_column("created_at").desc())
            .limit(1)
        )
        found += [tuple(row) for row in connection.execute(deepest)]
    return max(found)[2] if found else None


def recent_summaries(
    connection: Connection, scope: str, rules: Sequence[str], since: float, limit: int
) -> list[tuple[str, Message]]:
    """(session, reply) of the newest side turns since `since` that one of these rules marked."""
    statement = (
        select(TurnRow.session_id, NodeRow.body)
        .join(NodeRow, NodeRow.node_id == TurnRow.response_node_id)
        .where(
            IS_SIDE_TURN,
            TurnRow.created_at >= since,
            TurnRow.scope == scope,
            TurnRow.drop_detail.in_(rules),
        )
        .order_by(TurnRow.created_at.desc())
        .limit(limit)
    )
    return [(session_id, body) for session_id, body in connection.execute(statement)]


def _is_of(scope: str) -> ColumnElement[bool]:
    """That a turn is of the scope, as a condition that no index is looked up for.

    Without statistics SQLite takes an index that begins with the scope for as good as one that
    leads to the single turn, and reads all turns of the scope.
    """
    return (TurnRow.scope + "") == scope


def _refs(connection: Connection, *conditions: ColumnElement[bool]) -> list[TurnRef]:
    statement = _ref_columns().where(*conditions).order_by(TurnRow.created_at, TurnRow.turn_id)
    return [_ref(row) for row in connection.execute(statement)]


def _ref_columns() -> Any:
    return select(
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


def _ref(row: Row[Any]) -> TurnRef:
    return TurnRef(**{**row._mapping, "has_next_state": bool(row._mapping["has_next_state"])})
