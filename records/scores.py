"""Scores as rows and back: the hinted prompt is stored as what differs from the turn's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from records.arrays import as_ids, shared_ends
from records.claims import hint_hash
from records.loading import load_tokens
from records.models import ScoreRow
from records.sql import chunks
from records.types import Ids, Score


def score_row(score: Score, prompt_ids: Ids, response_ids: Ids, now: float) -> dict[str, Any]:
    """`score` as a row. Raises ValueError unless it has one finite log-prob per response id."""
    if len(score.teacher_logprobs) != len(response_ids):
        raise ValueError(
            f"turn {score.turn_id}: {len(score.teacher_logprobs)} teacher log-probs "
            f"for {len(response_ids)} response ids"
        )
    if not np.isfinite(score.teacher_logprobs).all():
        raise ValueError(f"turn {score.turn_id}: a teacher log-prob is not finite")
    hinted = as_ids(score.hinted_prompt_ids)
    prefix, suffix = shared_ends(prompt_ids, hinted)
    return {
        "turn_id": score.turn_id,
        "hint_hash": hint_hash(score.hint),
        "teacher": score.teacher,
        "teacher_version": score.teacher_version,
        "hint": score.hint,
        "prefix_length": prefix,
        "suffix_length": suffix,
        "middle_ids": hinted[prefix : len(hinted) - suffix],
        "teacher_logprobs": score.teacher_logprobs,
        "latency_s": score.latency_s,
        "created_at": now,
    }


def newest_scores(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Row[Any]]:
    """The newest score row of each turn that has one."""
    newest: dict[str, Row[Any]] = {}
    for part in chunks(turn_ids):
        statement = (
            select(ScoreRow.__table__)
            .where(ScoreRow.turn_id.in_(part))
            .order_by(ScoreRow.created_at)
        )
        newest.update((row.turn_id, row) for row in connection.execute(statement))
    return newest


def load_scores(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Score]:
    """The newest score of each turn that has one, with its whole hinted prompt."""
    rows = newest_scores(connection, turn_ids)
    tokens = load_tokens(connection, list(rows))
    return {turn_id: _score(row, tokens[turn_id][0]) for turn_id, row in rows.items()}


def _score(row: Row[Any], prompt_ids: Ids) -> Score:
    tail = len(prompt_ids) - row.suffix_length
    return Score(
        turn_id=row.turn_id,
        hint=row.hint,
        teacher=row.teacher,
        teacher_version=row.teacher_version,
        hinted_prompt_ids=np.concatenate(
            [prompt_ids[: row.prefix_length], row.middle_ids, prompt_ids[tail:]]
        ),
        teacher_logprobs=row.teacher_logprobs,
        latency_s=row.latency_s,
    )
