"""Reading turns whole: messages up the tree and prompt ids along the token chain, in batches.

One recursive query fetches every node that a batch of turns needs, another every token row; rows
that turns share are read once. Token ids are verified against the stored checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, bindparam, select

from records.errors import StoreCorrupt, UnknownTurn
from records.feedback.feedback import load as load_feedback
from records.messages import Message, echo_changes_of
from records.queue.round_robin import HINT_ONLY_PRIORITY
from records.tables.arrays import checksum
from records.tables.models import (
    NodeRow,
    RecordingRow,
    TokensRow,
    ToolsetRow,
    TurnRow,
    VariantRow,
    VerdictRow,
)
from records.tables.sql import rows_in
from records.turns.recording import REPLAY_PRIORITY, Recording
from records.types import Ids, Logprobs, TurnRecord, VersionSpan

TokenTriple = tuple[Ids, Ids, Logprobs]
_VALUES = bindparam("values", expanding=True)


def _with_ancestors(row_id: Any, parent_id: Any, *wanted: Any) -> Any:
    """`wanted` columns of the rows whose ids are in the parameter `values`, and of all rows above
    them. UNION, not UNION ALL: an ancestor that several rows share is visited once.
    """
    ids = (row_id.label("id"), parent_id.label("above"))
    walk = select(*ids).where(row_id.in_(_VALUES)).cte("walk", recursive=True)
    walk = walk.union(select(*ids).join(walk, row_id == walk.c.above))
    return select(*wanted).join(walk, row_id == walk.c.id)


_TURNS = (
    select(TurnRow.__table__, VerdictRow.hint, VerdictRow.candidates)
    .outerjoin(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
    .where(TurnRow.turn_id.in_(_VALUES))
)
_VARIANTS = select(VariantRow.body_hash, VariantRow.body).where(VariantRow.body_hash.in_(_VALUES))
_TOOLSETS = select(ToolsetRow.toolset_hash, ToolsetRow.body).where(
    ToolsetRow.toolset_hash.in_(_VALUES)
)
_RECORDINGS = select(RecordingRow.__table__).where(RecordingRow.turn_id.in_(_VALUES))
_NODES = _with_ancestors(
    NodeRow.node_id, NodeRow.parent_id, NodeRow.node_id, NodeRow.parent_id, NodeRow.body
)
_TOKENS = _with_ancestors(TokensRow.turn_id, TokensRow.token_parent_id, TokensRow.__table__)


def load_turns(
    connection: Connection, turn_ids: Sequence[str], *, skip_unknown: bool = False
) -> list[TurnRecord]:
    """The turns in the order asked for. Raises UnknownTurn (or leaves them out) or StoreCorrupt.

    Turns of a batch share the dicts of the messages that they share: copy before changing one.
    """
    rows = {row.turn_id: row for row in rows_in(connection, _TURNS, turn_ids)}
    if skip_unknown:
        turn_ids = [turn_id for turn_id in turn_ids if turn_id in rows]
    for turn_id in turn_ids:
        if turn_id not in rows:
            raise UnknownTurn(turn_id)
    leaves = {row.response_node_id for row in rows.values()}
    nodes = {row.node_id: row for row in rows_in(connection, _NODES, leaves)}
    forms = {value for row in rows.values() for value in (row.variants or {}).values()}
    variants = {row.body_hash: row.body for row in rows_in(connection, _VARIANTS, forms)}
    offered = {row.toolset_hash for row in rows.values() if row.toolset_hash is not None}
    toolsets = {row.toolset_hash: row.body for row in rows_in(connection, _TOOLSETS, offered)}
    tokens = load_tokens(connection, turn_ids)
    feedback = load_feedback(connection, turn_ids)
    recordings = load_recordings(
        connection, [turn_id for turn_id, row in rows.items() if row.priority == REPLAY_PRIORITY]
    )
    return [
        _record(
            rows[turn_id],
            nodes,
            variants,
            toolsets,
            tokens[turn_id],
            feedback.get(turn_id, ([], None)),
            recordings.get(turn_id),
        )
        for turn_id in turn_ids
    ]


def _record(
    row: Row[Any],
    nodes: dict[str, Row[Any]],
    variants: dict[str, Any],
    toolsets: dict[str, Any],
    tokens: TokenTriple,
    feedback: tuple[list[Message], float | None],
    recording: Recording | None,
) -> TurnRecord:
    said, reward = feedback
    path = _path(nodes, row.response_node_id)
    for position, body_hash in (row.variants or {}).items():
        path[int(position)] = variants[body_hash]
    prompt_ids, response_ids, rollout_logprobs = tokens
    return TurnRecord(
        turn_id=row.turn_id,
        session_id=row.session_id,
        parent_turn_id=row.parent_turn_id,
        turn_type=row.turn_type,
        state=row.state,
        drop_reason=row.drop_reason,
        messages=path[:-1],
        tools=toolsets[row.toolset_hash] if row.toolset_hash is not None else [],
        response=path[-1],
        next_state=[*(row.next_state or []), *said],
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=rollout_logprobs,
        sampling=row.sampling,
        distribution_modified=row.distribution_modified,
        version_spans=version_spans(row.version_spans),
        finish_reason=row.finish_reason,
        created_at=row.created_at,
        hint=row.hint,
        candidates=hint_candidates(row),
        teacher_key=row.teacher_key,
        data_source=row.data_source,
        findings=row.findings,
        num_reactions=len(said) + (row.next_state is not None),
        feedback_reward=reward,
        recording=recording,
        echo_changes=echo_changes_of(row.echo_changes),
        for_hint_alone=row.priority == HINT_ONLY_PRIORITY,
    )


def load_recordings(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Recording]:
    """Where those of these turns come from that belong to a recording."""
    return {
        row.turn_id: Recording(
            kind=row.kind,
            source=row.source,
            position=row.position,
            held_out=row.held_out,
            votes=None if row.votes is None else tuple(row.votes),
        )
        for row in rows_in(connection, _RECORDINGS, turn_ids)
    }


def hint_candidates(verdict: Row[Any]) -> tuple[str, ...]:
    """All hints of a verdict's row, the selected one first."""
    return tuple(verdict.candidates or ([verdict.hint] if verdict.hint else []))


def version_spans(stored: list[list[int]]) -> tuple[VersionSpan, ...]:
    """Spans from their stored form [[version, start, end], ...]."""
    return tuple(
        VersionSpan(version=version, start=start, end=end) for version, start, end in stored
    )


def _path(nodes: dict[str, Row[Any]], leaf: str) -> list[Message]:
    messages: list[Message] = []
    current: str | None = leaf
    while current is not None:
        node = nodes.get(current)
        if node is None:
            raise StoreCorrupt(f"message node {current} is missing")
        messages.append(node.body)
        current = node.parent_id
    messages.reverse()
    return messages


def turn_tokens(connection: Connection, turn_id: str) -> tuple[Ids, Ids]:
    """(prompt ids [P], response ids [R]) of a turn. Raises as `load_tokens`."""
    prompt_ids, response_ids, _ = load_tokens(connection, [turn_id])[turn_id]
    return prompt_ids, response_ids


def load_tokens(connection: Connection, turn_ids: Sequence[str]) -> dict[str, TokenTriple]:
    """Prompt ids [P], response ids [R] and rollout log-probs [R] of each turn.

    Raises UnknownTurn, and StoreCorrupt if the rebuilt ids do not match their checksum.
    """
    rows = {row.turn_id: row for row in rows_in(connection, _TOKENS, turn_ids)}
    for turn_id in turn_ids:
        if turn_id not in rows:
            raise UnknownTurn(turn_id)
    prompts: dict[str, Ids] = {}
    for turn_id in turn_ids:
        _rebuild_prompt(rows, prompts, turn_id)
    return {
        turn_id: (prompts[turn_id], rows[turn_id].response_ids, rows[turn_id].rollout_logprobs)
        for turn_id in turn_ids
    }


def _rebuild_prompt(rows: dict[str, Row[Any]], prompts: dict[str, Ids], turn_id: str) -> None:
    """Fill `prompts` for `turn_id` and the ancestors that it needs, oldest first."""
    pending = [turn_id]
    while rows[pending[-1]].token_parent_id is not None:
        if rows[pending[-1]].token_parent_id in prompts:
            break
        pending.append(rows[pending[-1]].token_parent_id)
    for current in reversed(pending):
        row = rows[current]
        prompt = row.prompt_ids
        if row.token_parent_id is not None:
            parent = rows[row.token_parent_id]
            before = np.concatenate([prompts[row.token_parent_id], parent.response_ids])
            prompt = np.concatenate([before[: row.num_shared_ids], prompt])
        prompts[current] = prompt
    row = rows[turn_id]
    if checksum(prompts[turn_id], row.response_ids) != row.checksum:
        raise StoreCorrupt(f"turn {turn_id}: the rebuilt token ids do not match their checksum")
