"""Writing a turn: its message path, tools, tokens and state; and, later, its next state.

`prepare` is pure and does the expensive part (hashes, JSON forms, checksums) before the write lock
is taken; `record_op` only writes. It decides nothing about which turns train: the proxy says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, and_, insert, or_, select, update

from records import sessions
from records.arrays import as_ids, checksum
from records.columns import dump_json
from records.errors import StoreConflict
from records.messages import Message, fingerprint, path_ids
from records.models import NodeRow, TokensRow, ToolsetRow, TurnRow, VariantRow
from records.sql import chunks, insert_missing
from records.types import CapturedTurn, DropReason, Ids, TurnState


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn as rows. `path` holds a node row for each prompt message, then the response."""

    path: list[dict[str, Any]]
    toolset: dict[str, Any] | None
    turn: dict[str, Any]
    tokens: dict[str, Any]
    parent_checksum: bytes | None
    """Checksum of the ids shared with the token parent; None without one."""


def prepare(turn: CapturedTurn, *, scope: str, now: float) -> PreparedTurn:
    """The rows of `turn`. Raises ValueError if it is not dropped and yet could never train."""
    if turn.drop_reason is None:
        _check_trainable(turn)
    messages = [*turn.messages, turn.response]
    node_ids = path_ids(scope, messages)
    toolset = None
    if turn.tools:
        toolset = {"toolset_hash": _content_hash(turn.tools), "body": turn.tools}
    prompt_ids = as_ids(turn.prompt_ids)
    shared = turn.num_shared_ids
    tokens = {
        "turn_id": turn.turn_id,
        "token_parent_id": turn.token_parent_id,
        "num_shared_ids": shared,
        "prompt_length": len(prompt_ids),
        "response_length": len(turn.response_ids),
        "checksum": checksum(prompt_ids, turn.response_ids),
        "prompt_ids": prompt_ids[shared:],
        "response_ids": turn.response_ids,
        "rollout_logprobs": turn.rollout_logprobs,
    }
    return PreparedTurn(
        path=_path_rows(scope, node_ids, messages),
        toolset=toolset,
        turn=_turn_row(turn, scope, node_ids, toolset, now),
        tokens=tokens,
        parent_checksum=checksum(prompt_ids[:shared]) if shared else None,
    )


def _check_trainable(turn: CapturedTurn) -> None:
    temperature = turn.sampling.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ValueError(
            f"turn {turn.turn_id}: sampling must state the temperature, got {temperature!r}"
        )
    if not len(turn.prompt_ids) or not len(turn.response_ids):
        raise ValueError(f"turn {turn.turn_id}: prompt and response must have tokens")
    if not turn.version_spans:
        raise ValueError(f"turn {turn.turn_id}: no policy version is known; drop it")
    if not np.isfinite(turn.rollout_logprobs).all():
        raise ValueError(f"turn {turn.turn_id}: a rollout log-prob is not finite; drop it")


def _path_rows(scope: str, node_ids: list[str], messages: list[Message]) -> list[dict[str, Any]]:
    parents = [None, *node_ids[:-1]]
    return [
        {
            "node_id": node,
            "scope": scope,
            "parent_id": parent,
            "depth": depth,
            "body_hash": _content_hash(message),
            "body": message,
        }
        for depth, (node, parent, message) in enumerate(
            zip(node_ids, parents, messages, strict=True)
        )
    ]


def _turn_row(
    turn: CapturedTurn,
    scope: str,
    node_ids: list[str],
    toolset: dict[str, Any] | None,
    now: float,
) -> dict[str, Any]:
    if len(node_ids) < 2:
        raise ValueError(f"turn {turn.turn_id}: a prompt has at least one message")
    versions = [span.version for span in turn.version_spans]
    dropped = turn.drop_reason is not None
    return {
        "turn_id": turn.turn_id,
        "session_id": turn.session_id,
        "scope": scope,
        "parent_turn_id": turn.parent_turn_id,
        "turn_type": turn.turn_type,
        "state": TurnState.DROPPED if dropped else TurnState.AWAITING_NEXT_STATE,
        "drop_reason": turn.drop_reason,
        "prompt_node_id": node_ids[-2],
        "response_node_id": node_ids[-1],
        "fingerprint": fingerprint(turn.response),
        "toolset_hash": toolset["toolset_hash"] if toolset else None,
        "sampling": turn.sampling,
        "distribution_modified": turn.distribution_modified,
        "version_spans": [[span.version, span.start, span.end] for span in turn.version_spans],
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "finish_reason": turn.finish_reason,
        "latency_s": turn.latency_s,
        "created_at": now,
        "updated_at": now,
    }


def _content_hash(value: Any) -> str:
    return hashlib.sha256(dump_json(value).encode()).hexdigest()


def record_op(connection: Connection, prepared: PreparedTurn) -> None:
    """Write a prepared turn. Writing the same turn again changes nothing.

    Raises StoreConflict if the turn id holds other tokens, ValueError for an unknown session or if
    the shared ids are not those of the token parent.
    """
    turn, tokens = prepared.turn, prepared.tokens
    if _already_recorded(connection, tokens):
        return
    sessions.touch_op(connection, turn["session_id"], turn["scope"], turn["created_at"])
    _check_parent(connection, prepared)
    variants = _insert_path(connection, prepared.path)
    if prepared.toolset is not None:
        insert_missing(connection, ToolsetRow, [prepared.toolset])
    connection.execute(insert(TurnRow), {**turn, "variants": variants or None})
    connection.execute(insert(TokensRow), tokens)


def _already_recorded(connection: Connection, tokens: dict[str, Any]) -> bool:
    stored = connection.scalar(
        select(TokensRow.checksum).where(TokensRow.turn_id == tokens["turn_id"])
    )
    if stored is not None and stored != tokens["checksum"]:
        raise StoreConflict(f"turn {tokens['turn_id']} is stored already, with other tokens")
    return stored is not None


def _check_parent(connection: Connection, prepared: PreparedTurn) -> None:
    """The usual case, a prompt that extends its parent's whole prompt + response, by checksum.

    Where only a part is shared the caller has compared the ids (`Store.record_turn`).
    """
    tokens = prepared.tokens
    if tokens["token_parent_id"] is None:
        return
    parent = connection.execute(
        select(TokensRow.prompt_length, TokensRow.response_length, TokensRow.checksum).where(
            TokensRow.turn_id == tokens["token_parent_id"]
        )
    ).one_or_none()
    if parent is None:
        raise ValueError(f"token parent {tokens['token_parent_id']!r} is not stored")
    total = parent.prompt_length + parent.response_length
    if tokens["num_shared_ids"] == total and parent.checksum != prepared.parent_checksum:
        raise ValueError(
            f"turn {tokens['turn_id']}: its first {total} prompt ids are not those of "
            f"turn {tokens['token_parent_id']}"
        )


def token_count(connection: Connection, turn_id: str) -> int | None:
    """Length of a turn's prompt + response; None for an unknown turn."""
    return connection.scalar(
        select(TokensRow.prompt_length + TokensRow.response_length).where(
            TokensRow.turn_id == turn_id
        )
    )


def check_shared_part(turn: CapturedTurn, parent_prompt: Ids, parent_response: Ids) -> None:
    """Raises ValueError unless the shared ids of `turn` are the parent's first ones."""
    before = np.concatenate([parent_prompt, parent_response])
    shared = turn.num_shared_ids
    if shared > len(before) or not np.array_equal(before[:shared], turn.prompt_ids[:shared]):
        raise ValueError(
            f"turn {turn.turn_id}: its first {shared} prompt ids are not those of "
            f"turn {turn.token_parent_id}"
        )


def _insert_path(connection: Connection, path: list[dict[str, Any]]) -> dict[str, str]:
    """Insert the missing nodes of a path; returns position -> content hash of other forms."""
    stored = _stored_bodies(connection, [row["node_id"] for row in path])
    missing = [row for row in path if row["node_id"] not in stored]
    insert_missing(connection, NodeRow, missing)
    if missing and connection.dialect.name != "sqlite":
        # A concurrent transaction may have inserted the same node with another form of its message.
        stored |= _stored_bodies(connection, [row["node_id"] for row in missing])
    other = {
        str(row["depth"]): row
        for row in path
        if stored.get(row["node_id"], row["body_hash"]) != row["body_hash"]
    }
    insert_missing(
        connection,
        VariantRow,
        [{"body_hash": row["body_hash"], "body": row["body"]} for row in other.values()],
    )
    return {position: row["body_hash"] for position, row in other.items()}


def _stored_bodies(connection: Connection, node_ids: list[str]) -> dict[str, str]:
    stored: dict[str, str] = {}
    for part in chunks(node_ids):
        rows = connection.execute(
            select(NodeRow.node_id, NodeRow.body_hash).where(NodeRow.node_id.in_(part))
        )
        stored.update((row.node_id, row.body_hash) for row in rows)
    return stored


def set_next_state_op(
    connection: Connection, turn_id: str, next_state: list[Message], now: float
) -> bool:
    """awaiting_next_state or dropped(no_next_state) -> judging. False in any other state."""
    waits = or_(
        TurnRow.state == TurnState.AWAITING_NEXT_STATE,
        and_(
            TurnRow.state == TurnState.DROPPED,
            TurnRow.drop_reason == DropReason.NO_NEXT_STATE,
        ),
    )
    changed = connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == turn_id, waits)
        .values(
            state=TurnState.JUDGING,
            next_state=next_state,
            drop_reason=None,
            drop_detail=None,
            updated_at=now,
        )
    )
    return changed.rowcount == 1
