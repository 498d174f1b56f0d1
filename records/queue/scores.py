"""Scores as rows and back: the hinted prompt is stored as its difference from the turn's prompt.

All candidates of a turn are scored and committed together, so a turn trains on the scores of its
newest commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from records.queue.claims import hint_hash
from records.tables.arrays import as_ids, shared_ends
from records.tables.loading import load_tokens
from records.tables.models import ScoreRow
from records.tables.sql import chunks
from records.types import UNSCORED, Ids, PolicyScore, Score, Teaching


def score_rows(
    scores: Sequence[Score], prompt_ids: Ids, response_ids: Ids, now: float
) -> list[dict[str, Any]]:
    """The scores of one turn's candidates as rows.

    Raises ValueError for two scores of one candidate, two teachers or turns, or an invalid one.
    """
    if not scores:
        return []
    turn_id = scores[0].turn_id
    if len({(one.turn_id, one.teacher, one.teacher_version) for one in scores}) > 1:
        raise ValueError(f"turn {turn_id}: scores of several turns or teachers in one commit")
    if min(len({one.candidate for one in scores}), len({one.hint for one in scores})) < len(scores):
        raise ValueError(f"turn {turn_id}: two scores of one candidate")
    return [_score_row(score, prompt_ids, response_ids, now) for score in scores]


def _score_row(score: Score, prompt_ids: Ids, response_ids: Ids, now: float) -> dict[str, Any]:
    """Raises ValueError unless an engine's score has one finite log-prob per response id."""
    if len(score.teacher_logprobs) != len(response_ids):
        raise ValueError(
            f"turn {score.turn_id}: {len(score.teacher_logprobs)} teacher log-probs "
            f"for {len(response_ids)} response ids"
        )
    is_scored = score.teacher_version != UNSCORED
    if is_scored and not np.isfinite(score.teacher_logprobs).all():
        raise ValueError(f"turn {score.turn_id}: a teacher log-prob is not finite")
    if score.topk_logprobs is not None and not np.isfinite(score.topk_logprobs).all():
        raise ValueError(f"turn {score.turn_id}: a top-k log-prob is not finite")
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
        "candidate": score.candidate,
        "topk_ids": None if score.topk_ids is None else score.topk_ids.ravel(),
        "topk_logprobs": None if score.topk_logprobs is None else score.topk_logprobs.ravel(),
    }


def checked_policy(policy: PolicyScore | None, response_ids: Ids) -> PolicyScore | None:
    """Raises ValueError unless it has one finite log-prob per response id."""
    if policy is not None and (
        len(policy.logprobs) != len(response_ids) or not np.isfinite(policy.logprobs).all()
    ):
        raise ValueError(
            f"turn {policy.turn_id}: the policy's score must have {len(response_ids)} finite "
            f"log-probs"
        )
    return policy


def newest_scores(connection: Connection, turn_ids: Sequence[str]) -> dict[str, list[Row[Any]]]:
    """The score rows of each turn's newest commit, best candidate first."""
    newest: dict[str, list[Row[Any]]] = {}
    for part in chunks(turn_ids):
        statement = (
            select(ScoreRow.__table__)
            .where(ScoreRow.turn_id.in_(part))
            .order_by(ScoreRow.created_at.desc(), ScoreRow.candidate)
        )
        for row in connection.execute(statement):
            rows = newest.setdefault(row.turn_id, [])
            if not rows or rows[0].created_at == row.created_at:
                rows.append(row)
    return newest


def load_scores(connection: Connection, turn_ids: Sequence[str]) -> dict[str, Score]:
    """The newest score of each turn that has one, its best candidate's, with the whole prompt."""
    found = load_candidate_scores(connection, turn_ids)
    return {turn_id: of_turn[0] for turn_id, of_turn in found.items()}


def load_candidate_scores(
    connection: Connection, turn_ids: Sequence[str]
) -> dict[str, tuple[Score, ...]]:
    """The newest scores of each turn that has any, best candidate first, with whole prompts."""
    rows = newest_scores(connection, turn_ids)
    tokens = load_tokens(connection, list(rows))
    return {
        turn_id: tuple(_score(row, tokens[turn_id][0]) for row in found)
        for turn_id, found in rows.items()
    }


def teachings(rows: Sequence[Row[Any]], prompt_ids: Ids) -> tuple[Teaching, ...]:
    """Score rows of one turn as a trainer needs them."""
    scores = [_score(row, prompt_ids) for row in rows]
    return tuple(
        Teaching(
            candidate=score.candidate,
            hint=score.hint,
            teacher=score.teacher,
            teacher_version=score.teacher_version,
            hinted_prompt_ids=score.hinted_prompt_ids,
            teacher_logprobs=(
                None if score.teacher_version == UNSCORED else score.teacher_logprobs
            ),
            topk_ids=score.topk_ids,
            topk_logprobs=score.topk_logprobs,
        )
        for score in scores
    )


def _score(row: Row[Any], prompt_ids: Ids) -> Score:
    tail = len(prompt_ids) - row.suffix_length
    shape = (len(row.teacher_logprobs), -1)
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
        candidate=row.candidate,
        topk_ids=None if row.topk_ids is None else row.topk_ids.reshape(shape),
        topk_logprobs=None if row.topk_logprobs is None else row.topk_logprobs.reshape(shape),
    )
