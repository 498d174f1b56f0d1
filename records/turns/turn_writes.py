"""Writing a turn: its message path, tools, tokens and state; and, later, its next state.

`prepare` is pure and does the expensive part (hashes, JSON forms, checksums) before the write lock
is taken; `record_op` only writes. Which turns train is decided by the proxy, not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, bindparam, select, update

from records.care.deletion import admit_writer
from records.errors import StoreConflict
from records.feedback.feedback import counts as feedback_counts
from records.feedback.feedback_writes import judge_again
from records.messages import Message, calls_key, fingerprint
from records.names import REJUDGEABLE, DropReason, TurnState
from records.search.indexing import note_turns
from records.tables.arrays import as_ids, checksum
from records.tables.columns import content_hash
from records.tables.models import (
    ExpertsRow,
    NodeRow,
    RecordingRow,
    TokensRow,
    ToolsetRow,
    TurnRow,
    VariantRow,
)
from records.tables.sql import insert_missing, rows_in, table_of
from records.turns import sessions
from records.turns.recording import REPLAY_PRIORITY, RecordingKind
from records.types import CapturedTurn, Ids

_INSERT_TURNS = table_of(TurnRow).insert()
_INSERT_TOKENS = table_of(TokensRow).insert()
_INSERT_EXPERTS = table_of(ExpertsRow).insert()
_INSERT_RECORDINGS = table_of(RecordingRow).insert()
_PARENTS = select(
    TokensRow.turn_id, TokensRow.prompt_length, TokensRow.response_length, TokensRow.checksum
).where(TokensRow.turn_id.in_(bindparam("values", expanding=True)))
_TOKEN_COUNT = select(TokensRow.prompt_length + TokensRow.response_length).where(
    TokensRow.turn_id == bindparam("turn_id")
)
_BODY_HASHES = select(NodeRow.node_id, NodeRow.body_hash).where(
    NodeRow.node_id.in_(bindparam("values", expanding=True))
)
_WITHOUT_NEXT_STATE = (
    select(TurnRow.turn_id, TurnRow.state, TurnRow.drop_reason)
    .where(TurnRow.turn_id.in_(bindparam("values", expanding=True)), TurnRow.next_state.is_(None))
    .order_by(TurnRow.turn_id)
    .with_for_update()
)
_SET_NEXT_STATE = (
    update(table_of(TurnRow))
    .where(TurnRow.turn_id == bindparam("key"))
    .values(
        state=TurnState.JUDGING,
        next_state=bindparam("messages"),
        echo_changes=bindparam("changes"),
        drop_reason=None,
        drop_detail=None,
        updated_at=bindparam("now"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """A turn as rows. `path` has a node row for each prompt message, then one for the response."""

    path: list[dict[str, Any]]
    toolset: dict[str, Any] | None
    turn: dict[str, Any]
    tokens: dict[str, Any]
    experts: dict[str, Any] | None
    recording: dict[str, Any] | None
    parent_checksum: bytes | None
    """Checksum of the ids shared with the token parent; None without one."""
    is_compared: bool = False
    """Whether the shared ids were compared with the parent's."""


def prepare(turn: CapturedTurn, *, scope: str, now: float) -> PreparedTurn:
    """The rows of `turn`. Raises ValueError if it is not dropped but could never train."""
    if turn.drop_reason is None:
        _check_trainable(turn)
    messages = [*turn.messages, turn.response]
    node_ids = turn.node_ids(scope)
    hashes = turn.body_hashes or [content_hash(message) for message in messages]
    toolset = None
    if turn.tools:
        toolset = {"toolset_hash": content_hash(turn.tools), "body": turn.tools}
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
        path=_path_rows(scope, node_ids, messages, hashes),
        toolset=toolset,
        turn=_turn_row(turn, scope, node_ids, toolset, now),
        tokens=tokens,
        experts=_experts_row(turn),
        recording=_recording_row(turn),
        parent_checksum=checksum(prompt_ids[:shared]) if shared else None,
    )


def _experts_row(turn: CapturedTurn) -> dict[str, Any] | None:
    """A turn that is already dropped will replay nothing."""
    if turn.routed_experts is None or turn.drop_reason is not None:
        return None
    return {"turn_id": turn.turn_id, "experts": turn.routed_experts}


def _recording_row(turn: CapturedTurn) -> dict[str, Any] | None:
    recording = turn.recording
    if recording is None:
        return None
    return {
        "turn_id": turn.turn_id,
        "kind": recording.kind,
        "source": recording.source,
        "position": recording.position,
        "held_out": recording.held_out,
        "votes": None if recording.votes is None else list(recording.votes),
    }


def _check_trainable(turn: CapturedTurn) -> None:
    temperature = turn.sampling.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ValueError(
            f"turn {turn.turn_id}: sampling must state the temperature, got {temperature!r}"
        )
    if not len(turn.prompt_ids) or not len(turn.response_ids):
        raise ValueError(f"turn {turn.turn_id}: prompt and response must have tokens")
    if turn.recording is not None and turn.recording.kind is not RecordingKind.RESAMPLED:
        return  # its version and perhaps its log-probs come when the policy has scored it
    if not turn.version_spans:
        raise ValueError(f"turn {turn.turn_id}: no policy version is known; drop it")
    if not np.isfinite(turn.rollout_logprobs).all():
        raise ValueError(f"turn {turn.turn_id}: a rollout log-prob is not finite; drop it")


def _path_rows(
    scope: str, node_ids: list[str], messages: list[Message], hashes: Sequence[str]
) -> list[dict[str, Any]]:
    parents = [None, *node_ids[:-1]]
    return [
        {
            "node_id": node,
            "scope": scope,
            "parent_id": parent,
            "depth": depth,
            "body_hash": body_hash,
            "body": message,
        }
        for depth, (node, parent, message, body_hash) in enumerate(
            zip(node_ids, parents, messages, hashes, strict=True)
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
    identity = turn.identity
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
        "drop_detail": turn.drop_detail if dropped else None,
        "prompt_node_id": node_ids[-2],
        "response_node_id": node_ids[-1],
        "fingerprint": identity.fingerprint if identity else fingerprint(turn.response),
        "calls_key": calls_key(turn.response),
        "toolset_hash": toolset["toolset_hash"] if toolset else None,
        "sampling": turn.sampling,
        "distribution_modified": turn.distribution_modified,
        "version_spans": [[span.version, span.start, span.end] for span in turn.version_spans],
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "finish_reason": turn.finish_reason,
        "latency_s": turn.latency_s,
        "teacher_key": turn.teacher_key,
        "data_source": turn.data_source,
        "request_echo": turn.request_echo,
        "user_id": turn.user_id,
        "findings": turn.findings or None,
        "priority": 0 if turn.recording is None else REPLAY_PRIORITY,
        "created_at": now,
        "updated_at": now,
    }


def record_op(connection: Connection, prepared: Sequence[PreparedTurn]) -> list[None]:
    """Write prepared turns. Writing a turn again changes nothing.

    Raises StoreConflict if a turn id has other tokens, ValueError for an unknown session or if the
    shared ids are not those of the token parent.
    """
    admit_writer(connection)
    new = _not_recorded(connection, prepared)
    if new:
        now = max(one.turn["created_at"] for one in new)
        seen = {(one.turn["session_id"], one.turn["scope"]) for one in new}
        sessions.touch_op(connection, seen, now)
        _check_parents(connection, new)
        variants = _insert_paths(connection, new)
        toolsets = {one.toolset["toolset_hash"]: one.toolset for one in new if one.toolset}
        insert_missing(connection, ToolsetRow, _by_key(toolsets))
        turns = [{**one.turn, "variants": variants[one.turn["turn_id"]] or None} for one in new]
        connection.execute(_INSERT_TURNS, turns)
        connection.execute(_INSERT_TOKENS, [one.tokens for one in new])
        note_turns(connection, [one.tokens["turn_id"] for one in new])
        if experts := [one.experts for one in new if one.experts is not None]:
            connection.execute(_INSERT_EXPERTS, experts)
        if recordings := [one.recording for one in new if one.recording is not None]:
            connection.execute(_INSERT_RECORDINGS, recordings)
    return [None] * len(prepared)


def _by_key(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of their keys: concurrent inserts then wait for each other in the same
    order.
    """
    return [rows[key] for key in sorted(rows)]


def _not_recorded(connection: Connection, prepared: Sequence[PreparedTurn]) -> list[PreparedTurn]:
    turn_ids = [one.tokens["turn_id"] for one in prepared]
    rows = rows_in(connection, _PARENTS, turn_ids)
    checksums = {row.turn_id: row.checksum for row in rows}
    new = []
    for one in prepared:
        turn_id, tokens = one.tokens["turn_id"], one.tokens["checksum"]
        if turn_id not in checksums:
            new.append(one)
        if checksums.setdefault(turn_id, tokens) != tokens:
            raise StoreConflict(f"turn {turn_id} is already stored, with other tokens")
    return new


def _check_parents(connection: Connection, prepared: Sequence[PreparedTurn]) -> None:
    """Check the usual case by checksum: a prompt that extends its parent's whole prompt + response.

    If only a part is shared, the caller must have compared the ids (`Store.record_turn`).
    """
    children = [one for one in prepared if one.tokens["token_parent_id"] is not None]
    parent_ids = [one.tokens["token_parent_id"] for one in children]
    parents = {row.turn_id: row for row in rows_in(connection, _PARENTS, parent_ids)}
    for one, parent_id in zip(children, parent_ids, strict=True):
        parent = parents.get(parent_id)
        if parent is None:
            raise ValueError(f"token parent {parent_id!r} is not stored")
        total = parent.prompt_length + parent.response_length
        is_whole = one.tokens["num_shared_ids"] == total
        if not (parent.checksum == one.parent_checksum if is_whole else one.is_compared):
            raise ValueError(
                f"turn {one.tokens['turn_id']}: its first {one.tokens['num_shared_ids']} prompt "
                f"ids are not those of turn {parent_id}"
            )


def token_count(connection: Connection, turn_id: str) -> int | None:
    """Length of a turn's prompt + response; None for an unknown turn."""
    return connection.scalar(_TOKEN_COUNT, {"turn_id": turn_id})


def check_shared_part(turn: CapturedTurn, parent_prompt: Ids, parent_response: Ids) -> None:
    """Raises ValueError unless the shared ids of `turn` are the parent's first ones."""
    before = np.concatenate([parent_prompt, parent_response])
    shared = turn.num_shared_ids
    if shared > len(before) or not np.array_equal(before[:shared], turn.prompt_ids[:shared]):
        raise ValueError(
            f"turn {turn.turn_id}: its first {shared} prompt ids are not those of "
            f"turn {turn.token_parent_id}"
        )


def _insert_paths(
    connection: Connection, prepared: Sequence[PreparedTurn]
) -> dict[str, dict[str, str]]:
    """Insert the missing nodes; returns turn id -> position -> content hash of other forms."""
    node_ids = [row["node_id"] for one in prepared for row in one.path]
    stored = _stored_bodies(connection, node_ids)
    missing: dict[str, dict[str, Any]] = {}
    for one in prepared:
        for row in one.path:
            if row["node_id"] not in stored:
                missing.setdefault(row["node_id"], row)
    # A parent is above its children, and rows must exist before others refer to them.
    ordered = sorted(missing.values(), key=lambda row: (row["depth"], row["node_id"]))
    insert_missing(connection, NodeRow, ordered)
    stored |= {node: row["body_hash"] for node, row in missing.items()}
    if missing and connection.dialect.name != "sqlite":
        # A concurrent transaction may have inserted the same node with another form of its message.
        stored |= _stored_bodies(connection, list(missing))
    variants: dict[str, dict[str, str]] = {}
    bodies: dict[str, dict[str, Any]] = {}
    for one in prepared:
        other = [row for row in one.path if stored[row["node_id"]] != row["body_hash"]]
        variants[one.turn["turn_id"]] = {str(row["depth"]): row["body_hash"] for row in other}
        bodies.update(
            (row["body_hash"], {"body_hash": row["body_hash"], "body": row["body"]})
            for row in other
        )
    insert_missing(connection, VariantRow, _by_key(bodies))
    return variants


def _stored_bodies(connection: Connection, node_ids: list[str]) -> dict[str, str]:
    return {row.node_id: row.body_hash for row in rows_in(connection, _BODY_HASHES, node_ids)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextState:
    """The messages that followed a turn; `echo_changes`: what the client had changed in the turn's
    answer before them (`records.messages.EchoChange`, separated by commas), None if nothing.
    """

    turn_id: str
    messages: list[Message]
    now: float
    echo_changes: str | None = None


def set_next_state_op(connection: Connection, wanted: Sequence[NextState]) -> list[bool]:
    """awaiting_next_state or dropped(no_next_state) -> judging; so does a turn that was judged by
    feedback alone, but what the trainer has keeps its state. False for any other turn.
    """
    turn_ids = sorted(one.turn_id for one in wanted)
    found = {row.turn_id: row for row in rows_in(connection, _WITHOUT_NEXT_STATE, turn_ids)}
    judged = _judged_by_feedback(connection, found.values())
    outcomes, changes = [], []
    for one in wanted:
        row = found.pop(one.turn_id, None)
        is_taken = row is not None and (_is_waiting(row) or one.turn_id in judged)
        outcomes.append(is_taken)
        if row is None or not is_taken:
            continue
        if _is_waiting(row):
            change = {"key": one.turn_id, "messages": one.messages, "now": one.now}
            changes.append({**change, "changes": one.echo_changes})
        else:
            _follow_judged(connection, row, one)
    if changes:
        connection.execute(_SET_NEXT_STATE, changes)
    return outcomes


def _is_waiting(row: Row[Any]) -> bool:
    return row.state is TurnState.AWAITING_NEXT_STATE or (
        row.drop_reason is DropReason.NO_NEXT_STATE
    )


def _judged_by_feedback(connection: Connection, rows: Iterable[Row[Any]]) -> Collection[str]:
    """Those of these turns, all without a next state, that went on anyway."""
    went_on = [
        row.turn_id
        for row in rows
        if not _is_waiting(row)
        and (row.state is not TurnState.DROPPED or row.drop_reason in REJUDGEABLE)
    ]
    return feedback_counts(connection, went_on) if went_on else ()


def _follow_judged(connection: Connection, row: Row[Any], wanted: NextState) -> None:
    if row.state not in (TurnState.LEASED, TurnState.TRAINED):
        judge_again(
            connection,
            row.turn_id,
            row.state,
            wanted.now,
            next_state=wanted.messages,
            echo_changes=wanted.echo_changes,
        )
        return
    connection.execute(
        update(TurnRow)
        .where(TurnRow.turn_id == row.turn_id)
        .values(next_state=wanted.messages, echo_changes=wanted.echo_changes)
    )
