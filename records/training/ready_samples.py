"""Reading leased turns as samples for a trainer: tokens, scores, reward, and what goes with them.

It only reads; leasing, and checking what a sample lacks for an objective, are done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, func, select

from records.errors import StoreCorrupt
from records.queue.scores import newest_scores, teachings
from records.queue.side_samples import load_side_samples
from records.tables.loading import TokenTriple, load_recordings, load_tokens, version_spans
from records.tables.models import ExpertsRow, NodeRow, TurnRow, VerdictRow
from records.tables.sql import chunks
from records.training.history.prompts import load_histories
from records.training.history.sessions import load_sessions
from records.training.history.window import HistoryWindow
from records.turns.recording import REPLAY_PRIORITY, Recording
from records.types import (
    NO_HISTORY,
    UNKNOWN_OUTCOME,
    Experts,
    PromptHistory,
    ReadySample,
    SessionOutcome,
    SideSamples,
)


def load_samples(
    connection: Connection,
    turn_ids: Sequence[str],
    window: HistoryWindow | None = None,
    with_outcomes: bool = False,
) -> list[ReadySample]:
    """The samples of these turns, in the order asked for; with a `window` also the earlier answers
    to their prompts, and `with_outcomes` their sessions' outcomes.

    Raises StoreCorrupt for a turn with neither a score nor a reward, nor one to come.
    """
    rows = _turn_rows(connection, turn_ids)
    tokens = load_tokens(connection, turn_ids)
    scores = newest_scores(connection, turn_ids)
    experts = _load_experts(connection, turn_ids)
    drawn = load_side_samples(connection, turn_ids)
    steps = _step_indices(connection, turn_ids)
    recorded = [turn_id for turn_id in turn_ids if rows[turn_id].priority == REPLAY_PRIORITY]
    recordings = load_recordings(connection, recorded)
    histories: dict[str, PromptHistory] = {}
    sessions: dict[str, SessionOutcome] = {}
    if with_outcomes:
        versions = window.versions if window is not None and window.sessions else None
        values = window is not None and window.values
        sessions = load_sessions(connection, rows, versions, values)
    if window is not None:
        lengths = {turn_id: len(prompt_ids) for turn_id, (prompt_ids, *_) in tokens.items()}
        histories = load_histories(connection, rows, lengths, window)
    return [
        _sample(
            rows[turn_id],
            tokens[turn_id],
            scores.get(turn_id, []),
            routed_experts=experts.get(turn_id),
            side_samples=drawn.get(turn_id),
            step_index=steps[turn_id],
            recording=recordings.get(turn_id),
            history=histories.get(turn_id, NO_HISTORY),
            session=sessions.get(turn_id, UNKNOWN_OUTCOME),
        )
        for turn_id in turn_ids
    ]


def _turn_rows(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Row[Any]]:
    rows: dict[str, Row[Any]] = {}
    for part in chunks(turn_ids):
        statement = (
            select(
                TurnRow.__table__,
                VerdictRow.reward,
                VerdictRow.awaits_outcome,
                NodeRow.body.label("last_message"),
            )
            .join(NodeRow, NodeRow.node_id == TurnRow.prompt_node_id)
            .outerjoin(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
            .where(TurnRow.turn_id.in_(part))
        )
        rows.update((row.turn_id, row) for row in connection.execute(statement))
    return rows


def _step_indices(connection: Connection, turn_ids: Sequence[str]) -> dict[str, int]:
    """How many turns lead to each, counted along its parents."""
    found: dict[str, int] = {}
    for part in chunks(turn_ids):
        path = (
            select(TurnRow.turn_id, TurnRow.parent_turn_id.label("ancestor"))
            .where(TurnRow.turn_id.in_(part))
            .cte("path", recursive=True)
        )
        path = path.union_all(
            select(path.c.turn_id, TurnRow.parent_turn_id).where(TurnRow.turn_id == path.c.ancestor)
        )
        statement = select(path.c.turn_id, func.count(path.c.ancestor)).group_by(path.c.turn_id)
        found.update((turn_id, count) for turn_id, count in connection.execute(statement))
    return found


def _load_experts(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Experts]:
    found: dict[str, Experts] = {}
    for part in chunks(turn_ids):
        statement = select(ExpertsRow.turn_id, ExpertsRow.experts)
        for row in connection.execute(statement.where(ExpertsRow.turn_id.in_(part))):
            found[row.turn_id] = row.experts
    return found


def _sample(
    row: Row[Any],
    tokens: TokenTriple,
    scores: Sequence[Row[Any]],
    *,
    routed_experts: Experts | None,
    side_samples: SideSamples | None,
    step_index: int,
    recording: Recording | None,
    history: PromptHistory,
    session: SessionOutcome,
) -> ReadySample:
    if not scores and row.reward is None and not row.awaits_outcome:
        raise StoreCorrupt(f"turn {row.turn_id} is leased without a score or a reward")
    prompt_ids, response_ids, rollout_logprobs = tokens
    unscored = np.full(len(response_ids), np.nan, dtype=np.float32)
    return ReadySample(
        turn_id=row.turn_id,
        session_id=row.session_id,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=rollout_logprobs,
        teacher_logprobs=scores[0].teacher_logprobs if scores else unscored,
        temperature=float(row.sampling["temperature"]),
        distribution_modified=row.distribution_modified,
        version_spans=version_spans(row.version_spans),
        hint=scores[0].hint if scores else "",
        created_at=row.created_at,
        after_tool=row.last_message["role"] == "tool",
        reward=row.reward,
        teachings=teachings(scores, prompt_ids),
        routed_experts=routed_experts,
        side_samples=side_samples,
        step_index=step_index,
        recording_kind=None if recording is None else recording.kind,
        is_cut=row.finish_reason == "length",
        scope=row.scope,
        history=history,
        session=session,
        times_trained=row.times_trained,
    )
