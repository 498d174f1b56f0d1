"""Lessons as rows and back: the prompt is stored as its difference from the recorded turn's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, func, select

from records.errors import StoreCorrupt
from records.lessons.claiming import UNFINISHED
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.rows import LessonRow, LessonScoreRow, LessonTokensRow
from records.lessons.types import Lesson, LessonSample, LessonScore
from records.tables.arrays import as_ids, checksum, shared_ends
from records.tables.loading import load_tokens, version_spans
from records.tables.models import NodeRow, TurnRow
from records.tables.sql import chunks, table_of
from records.training.teaching import Ids, Teaching
from records.types import ReadySample


def sample_row(sample: LessonSample, state_prompt: Ids) -> dict[str, Any]:
    """A sample's tokens as a row; `state_prompt` is the prompt of the turn that it came from.

    Raises ValueError if it could not train: no prompt, response or temperature, log-probs that are
    not finite, tokens without a version.
    """
    response_ids, logprobs = as_ids(sample.response_ids), np.asarray(sample.rollout_logprobs)
    what = f"lesson {sample.lesson_id}"
    if not len(response_ids) or logprobs.shape != response_ids.shape:
        raise ValueError(
            f"{what}: {len(response_ids)} response ids and {len(logprobs)} log-probs: one non-zero "
            "length is needed"
        )
    if not len(sample.prompt_ids):
        raise ValueError(f"{what}: a prompt without tokens cannot be scored")
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{what}: a rollout log-prob is not finite")
    if not isinstance(sample.sampling.get("temperature"), (int, float)):
        raise ValueError(f"{what}: no sampling temperature")
    covered = [place for span in sample.version_spans for place in range(span.start, span.end)]
    if sorted(covered) != list(range(len(response_ids))):
        raise ValueError(f"{what}: the version spans do not cover each response token once")
    return {
        "lesson_id": sample.lesson_id,
        **_difference(state_prompt, as_ids(sample.prompt_ids)),
        "response_ids": response_ids,
        "rollout_logprobs": logprobs,
        "checksum": checksum(sample.prompt_ids, response_ids),
        "version_spans": [[one.version, one.start, one.end] for one in sample.version_spans],
        "sampling": sample.sampling,
        "finish_reason": sample.finish_reason,
    }


def score_row(score: LessonScore, sample: LessonSample, now: float) -> dict[str, Any]:
    """A score as a row. Raises ValueError unless it has one finite log-prob per response id, and
    finite top-k log-probs for each or none.
    """
    what, logprobs = f"lesson {score.lesson_id}", np.asarray(score.teacher_logprobs)
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{what}: a teacher log-prob is not finite")
    if score.topk_logprobs is not None and not np.isfinite(score.topk_logprobs).all():
        raise ValueError(f"{what}: a top-k log-prob is not finite")
    _teaching(score).check(score.lesson_id, len(sample.response_ids))
    return {
        "lesson_id": score.lesson_id,
        "hint": score.hint,
        "teacher": score.teacher,
        "teacher_version": score.teacher_version,
        **_difference(sample.prompt_ids, as_ids(score.teacher_prompt_ids)),
        "teacher_logprobs": logprobs,
        "topk_ids": None if score.topk_ids is None else score.topk_ids.ravel(),
        "topk_logprobs": None if score.topk_logprobs is None else score.topk_logprobs.ravel(),
        "created_at": now,
    }


def _difference(before: Ids, after: Ids) -> dict[str, Any]:
    prefix, suffix = shared_ends(before, after)
    middle = after[prefix : len(after) - suffix]
    return {"prefix_length": prefix, "suffix_length": suffix, "middle_ids": middle}


def _changed(before: Ids, row: Row[Any]) -> Ids:
    tail = len(before) - row.suffix_length
    return np.concatenate([before[: row.prefix_length], row.middle_ids, before[tail:]])


def load_lessons(connection: Connection, lesson_ids: Sequence[str]) -> list[Lesson]:
    """Those of these lessons that exist, in this order, whole.

    Raises StoreCorrupt if the rebuilt ids do not match their checksum.
    """
    rows = _rows(connection, LessonRow, lesson_ids)
    tokens = _rows(connection, LessonTokensRow, lesson_ids)
    scores = _rows(connection, LessonScoreRow, lesson_ids)
    sampled_at = sorted({rows[lesson_id].state_turn_id for lesson_id in tokens})
    prompts = {key: of_turn[0] for key, of_turn in load_tokens(connection, sampled_at).items()}
    return [
        _lesson(
            rows[lesson_id],
            tokens.get(lesson_id),
            scores.get(lesson_id),
            prompts.get(rows[lesson_id].state_turn_id),
        )
        for lesson_id in lesson_ids
        if lesson_id in rows
    ]


def _rows(connection: Connection, model: Any, lesson_ids: Sequence[str]) -> dict[str, Row[Any]]:
    found: dict[str, Row[Any]] = {}
    for part in chunks(lesson_ids):
        statement = select(table_of(model)).where(model.lesson_id.in_(part))
        found.update((row.lesson_id, row) for row in connection.execute(statement))
    return found


def _lesson(
    row: Row[Any], tokens: Row[Any] | None, score: Row[Any] | None, state_prompt: Ids | None
) -> Lesson:
    sample = None
    if tokens is not None:
        assert state_prompt is not None
        sample = _sample(tokens, state_prompt)
    return Lesson(
        lesson_id=row.lesson_id,
        kind=row.kind,
        scope=row.scope,
        hint_id=row.hint_id,
        state_turn_id=row.state_turn_id,
        prompt_id=row.prompt_id,
        state=row.state,
        drop_reason=row.drop_reason,
        drop_detail=row.drop_detail,
        created_at=row.created_at,
        trained_version=row.trained_version,
        sample=sample,
        score=None if score is None or sample is None else _score(score, sample.prompt_ids),
    )


def _sample(row: Row[Any], state_prompt: Ids) -> LessonSample:
    prompt_ids = _changed(state_prompt, row)
    if checksum(prompt_ids, row.response_ids) != row.checksum:
        raise StoreCorrupt(
            f"lesson {row.lesson_id}: the rebuilt token ids do not match their checksum"
        )
    return LessonSample(
        lesson_id=row.lesson_id,
        prompt_ids=prompt_ids,
        response_ids=row.response_ids,
        rollout_logprobs=row.rollout_logprobs,
        version_spans=version_spans(row.version_spans),
        sampling=row.sampling,
        finish_reason=row.finish_reason,
    )


def _score(row: Row[Any], prompt_ids: Ids) -> LessonScore:
    shape = (len(row.teacher_logprobs), -1)
    return LessonScore(
        lesson_id=row.lesson_id,
        hint=row.hint,
        teacher=row.teacher,
        teacher_version=row.teacher_version,
        teacher_prompt_ids=_changed(prompt_ids, row),
        teacher_logprobs=row.teacher_logprobs,
        topk_ids=None if row.topk_ids is None else row.topk_ids.reshape(shape),
        topk_logprobs=None if row.topk_logprobs is None else row.topk_logprobs.reshape(shape),
    )


def load_samples(connection: Connection, lesson_ids: Sequence[str]) -> list[ReadySample]:
    """Leased lessons as samples for a trainer, in the order asked for.

    Raises StoreCorrupt for one without tokens or a score.
    """
    lessons = load_lessons(connection, lesson_ids)
    after_tool = _after_tool(connection, [one.state_turn_id for one in lessons])
    return [_ready(one, one.state_turn_id in after_tool) for one in lessons]


def _after_tool(connection: Connection, turn_ids: Sequence[str]) -> set[str]:
    """Turns whose prompt ends with a tool's result."""
    found: set[str] = set()
    for part in chunks(sorted(set(turn_ids))):
        statement = (
            select(TurnRow.turn_id, NodeRow.body)
            .join(NodeRow, NodeRow.node_id == TurnRow.prompt_node_id)
            .where(TurnRow.turn_id.in_(part))
        )
        found.update(key for key, body in connection.execute(statement) if body["role"] == "tool")
    return found


def _ready(lesson: Lesson, after_tool: bool) -> ReadySample:
    sample, score = lesson.sample, lesson.score
    if sample is None or score is None:
        raise StoreCorrupt(f"lesson {lesson.lesson_id} is leased without tokens or a score")
    return ReadySample(
        turn_id=lesson.lesson_id,
        # A session of its own: samples at one state share a prompt, but are not a dialogue.
        session_id=lesson.lesson_id,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        rollout_logprobs=sample.rollout_logprobs,
        teacher_logprobs=score.teacher_logprobs,
        temperature=float(sample.sampling["temperature"]),
        distribution_modified=None,
        version_spans=sample.version_spans,
        hint=score.hint,
        created_at=lesson.created_at,
        after_tool=after_tool,
        teachings=(_teaching(score),),
        lesson=lesson.kind,
        hint_id=lesson.hint_id,
    )


def _teaching(score: LessonScore) -> Teaching:
    return Teaching(
        candidate=0,
        hint=score.hint,
        teacher=score.teacher,
        teacher_version=score.teacher_version,
        hinted_prompt_ids=score.teacher_prompt_ids,
        teacher_logprobs=score.teacher_logprobs,
        topk_ids=score.topk_ids,
        topk_logprobs=score.topk_logprobs,
    )


def outcomes_at(connection: Connection, turn_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """What became of the lessons at each of these turns: how many by kind and state, and by reason
    if they were dropped, such as `hint trained` or `counter dropped (stale)`.
    """
    found: dict[str, dict[str, int]] = {}
    for part in chunks(turn_ids):
        row = LessonRow
        columns = (row.state_turn_id, row.kind, row.state, row.drop_reason)
        statement = select(*columns, func.count()).where(row.state_turn_id.in_(part))
        for turn_id, kind, state, reason, number in connection.execute(
            statement.group_by(*columns)
        ):
            why = f" ({reason.value})" if state is LessonState.DROPPED and reason else ""
            found.setdefault(turn_id, {})[f"{kind.value} {state.value}{why}"] = number
    return found


def counts(connection: Connection) -> dict[tuple[LessonKind, LessonState], int]:
    """Number of lessons on their way, by kind and state; its cost does not grow with those that are
    trained or dropped.
    """
    statement = (
        select(LessonRow.kind, LessonRow.state, func.count())
        .where(LessonRow.state.in_(UNFINISHED))
        .group_by(LessonRow.kind, LessonRow.state)
    )
    return {(kind, state): number for kind, state, number in connection.execute(statement)}


def totals(connection: Connection) -> dict[tuple[LessonKind, LessonState], int]:
    """Number of all lessons, by kind and state: counted along an index, in time that grows with
    their number.
    """
    columns = (LessonRow.kind, LessonRow.state)
    statement = select(*columns, func.count()).group_by(*columns)
    return {(kind, state): number for kind, state, number in connection.execute(statement)}


def trained_by_hint(
    connection: Connection, hint_ids: Sequence[str] | None = None
) -> dict[str, dict[LessonKind, int]]:
    """Number of trained lessons of each of these hints, by kind; None: of all."""
    columns = (LessonRow.hint_id, LessonRow.kind)
    statement = (
        select(*columns, func.count())
        .where(LessonRow.state == LessonState.TRAINED, LessonRow.hint_id.is_not(None))
        .group_by(*columns)
    )
    parts = [statement]
    if hint_ids is not None:
        parts = [statement.where(LessonRow.hint_id.in_(part)) for part in chunks(hint_ids)]
    found: dict[str, dict[LessonKind, int]] = {}
    for part in parts:
        for hint_id, kind, number in connection.execute(part):
            found.setdefault(str(hint_id), {})[kind] = number
    return found


def drops(connection: Connection) -> dict[LessonDrop, int]:
    """Number of dropped lessons by reason."""
    statement = (
        select(LessonRow.drop_reason, func.count())
        .where(LessonRow.state == LessonState.DROPPED, LessonRow.drop_reason.is_not(None))
        .group_by(LessonRow.drop_reason)
    )
    return {reason: number for reason, number in connection.execute(statement) if reason}
