"""What no lesson may be; part of the check of a whole database (records/care/verify.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, exists, func, select

from records.errors import StoreError
from records.lessons.names import LessonKind, LessonState
from records.lessons.reading import load_lessons
from records.lessons.rows import LessonRow, LessonScoreRow, LessonTokensRow
from records.tables.models import PolicyVersionRow
from records.tables.sql import chunks

_SHOWN = 3
_BATCH = 200
_CLAIMED = (LessonState.SAMPLING, LessonState.SCORING, LessonState.LEASED)


def state_problems(connection: Connection) -> Iterator[str]:
    """Lessons that break a rule of the states, one line for each rule."""
    for what, condition, count in _counts():
        if number := connection.scalar(count):
            some = select(LessonRow.lesson_id).where(condition).order_by(LessonRow.lesson_id)
            shown = ", ".join(connection.scalars(some.limit(_SHOWN)))
            yield f"{number} lessons {what}: {shown}{', ...' if number > _SHOWN else ''}"


@cache
def _counts() -> list[tuple[str, ColumnElement[bool], Select[Any]]]:
    """The rules, and how many lessons break each."""
    count = select(func.count()).select_from(LessonRow)
    return [(what, condition, count.where(condition)) for what, condition in _rules()]


def _rules() -> list[tuple[str, ColumnElement[bool]]]:
    state, owner, until = LessonRow.state, LessonRow.claim_owner, LessonRow.claim_until
    dropped, trained = state == LessonState.DROPPED, state == LessonState.TRAINED
    tokens = exists().where(LessonTokensRow.lesson_id == LessonRow.lesson_id)
    score = exists().where(LessonScoreRow.lesson_id == LessonRow.lesson_id)
    abandoned = exists().where(
        PolicyVersionRow.version == LessonRow.trained_version,
        PolicyVersionRow.abandoned.is_(True),
    )
    teachable = state.in_((LessonState.READY, LessonState.LEASED))
    return [
        ("are dropped without a reason", and_(dropped, LessonRow.drop_reason.is_(None))),
        (
            # A leased one may have a reason: it is dropped if it is given back.
            "have a drop reason but are not dropped",
            and_(
                state.not_in((LessonState.DROPPED, LessonState.LEASED)),
                LessonRow.drop_reason.is_not(None),
            ),
        ),
        ("are trained in no version", and_(trained, LessonRow.trained_version.is_(None))),
        (
            "have a version but are not trained",
            and_(~trained, LessonRow.trained_version.is_not(None)),
        ),
        ("are trained in an abandoned version", and_(trained, abandoned)),
        ("have an owner without a deadline", and_(owner.is_not(None), until.is_(None))),
        ("have a deadline without an owner", and_(owner.is_(None), until.is_not(None))),
        ("are leased to nobody", and_(state == LessonState.LEASED, owner.is_(None))),
        (
            "have an owner in a state that has none",
            and_(state.not_in(_CLAIMED), owner.is_not(None)),
        ),
        ("wait for a score without tokens", and_(state == LessonState.SCORING, ~tokens)),
        ("can be trained on without tokens or a score", and_(teachable, ~and_(tokens, score))),
        (
            "name no hint, but are not keep-lessons",
            and_(LessonRow.kind != LessonKind.KEEP, LessonRow.hint_id.is_(None)),
        ),
    ]


def token_problems(connection: Connection) -> Iterator[str]:
    """Lessons whose ids cannot be rebuilt, or are not those that were sampled."""
    statement = select(LessonTokensRow.lesson_id).order_by(LessonTokensRow.lesson_id)
    for part in chunks(list(connection.scalars(statement)), _BATCH):
        if _problem(connection, list(part)) is None:
            continue
        for lesson_id in part:
            problem = _problem(connection, [lesson_id])
            if problem is not None:
                yield problem


def _problem(connection: Connection, lesson_ids: list[str]) -> str | None:
    try:
        load_lessons(connection, lesson_ids)
    except (StoreError, ValueError, KeyError) as error:
        return f"lesson {lesson_ids[0]}: {error}"
    return None
