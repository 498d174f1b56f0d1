"""Sessions by the text of their turns: a bounded part of the matches at a time, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, text

from records.reading.browsing import ASKED_OF_TURNS, ListedSession, Wanted, fits, listed_sessions
from records.search import parts
from records.search.indexing import REFUSED_WORD, scope_word, turn_texts
from records.search.words import Excerpt, excerpt
from records.tables.models import IS_NOT_INDEXED, SessionRow, TurnRow, TurnTextRow

MOST_MATCHES = 500
"""Matching turns that one page looks at."""
MOST_COUNTED = 10_000
"""Turns that are counted as not indexed yet, and as refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSession:
    """A session with its newest matching turn; None: the words are not close to its beginning."""

    session: ListedSession
    turn_id: str
    excerpt: Excerpt | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPage:
    """Matching sessions, that of the newest match first. `next` is where to go on, None at the end;
    `num_waiting` turns (at most MOST_COUNTED) are not indexed yet, and `num_refused` cannot be.
    """

    sessions: tuple[FoundSession, ...]
    num_examined: int
    num_waiting: int
    num_refused: int
    next: int | None


def found_page(
    connection: Connection,
    scope: str | None,
    wanted: Wanted,
    phrases: Sequence[str],
    after: int | None,
    limit: int,
) -> FoundPage:
    """Up to `limit` sessions with a turn that contains all phrases and matches all values wanted;
    fewer if MOST_MATCHES matches do not contain so many. On later pages, a session is listed again
    where an older turn of it matches.
    """
    if connection.dialect.name == "sqlite":
        # One look at the index, whose parts come and go.
        connection.exec_driver_sql("BEGIN")
    own = [] if scope is None else [scope_word(scope)]
    numbers = _matches(connection, [*own, *phrases], after, MOST_MATCHES)
    turns = _turns(connection, numbers)
    taken: dict[str, Any] = {}
    examined = 0
    for number in numbers:
        examined += 1
        turn = turns.get(number)
        if turn is None or turn.session_id in taken or not _is_wanted(turn, scope, wanted):
            continue
        taken[turn.session_id] = turn
        if len(taken) == limit:
            break
    sessions = listed_sessions(connection, list(taken))
    texts = turn_texts(connection, [one.turn_id for one in taken.values()])
    is_end = examined == len(numbers) and len(numbers) < MOST_MATCHES
    return FoundPage(
        sessions=tuple(
            FoundSession(
                session=sessions[session_id],
                turn_id=turn.turn_id,
                excerpt=excerpt(texts.get(turn.turn_id, ""), phrases),
            )
            for session_id, turn in taken.items()
        ),
        num_examined=examined,
        num_waiting=_num_waiting(connection, scope),
        num_refused=len(_matches(connection, [*own, REFUSED_WORD], None, MOST_COUNTED)),
        next=None if is_end or not numbers else numbers[examined - 1],
    )


def _is_wanted(turn: Any, scope: str | None, wanted: Wanted) -> bool:
    is_theirs = scope in (None, turn.scope)
    return is_theirs and fits(turn, wanted) and wanted.is_within(turn.began)


def _matches(
    connection: Connection, phrases: Sequence[str], after: int | None, most: int
) -> list[int]:
    """Numbers of the newest turns before `after` that contain all phrases."""
    if connection.dialect.name == "sqlite":
        query = " ".join(f'"{phrase}"' for phrase in phrases)
        return parts.matches(connection, query, after, most)
    names = [f"phrase{index}" for index in range(len(phrases))]
    asked = " && ".join(f"phraseto_tsquery('simple', :{name})" for name in names)
    values: dict[str, Any] = {"limit": most, **dict(zip(names, phrases, strict=True))}
    before = ""
    if after is not None:
        values["after"] = after
        before = "AND number < :after"
    statement = (
        f"SELECT number FROM turn_words WHERE words @@ ({asked}) {before} "
        "ORDER BY number DESC LIMIT :limit"
    )
    return list(connection.scalars(text(statement), values))


def _turns(connection: Connection, numbers: Sequence[int]) -> dict[int, Any]:
    columns = (
        *(TurnTextRow.number, TurnRow.turn_id, TurnRow.session_id, TurnRow.scope),
        *(*ASKED_OF_TURNS, SessionRow.created_at.label("began")),
    )
    statement = (
        select(*columns)
        .join(TurnRow, TurnRow.turn_id == TurnTextRow.turn_id)
        .join(SessionRow, SessionRow.session_id == TurnRow.session_id)
        .where(TurnTextRow.number.in_(numbers))
    )
    return {row.number: row for row in connection.execute(statement)}


def _num_waiting(connection: Connection, scope: str | None) -> int:
    waiting = select(TurnTextRow.number).where(IS_NOT_INDEXED).limit(MOST_COUNTED)
    if scope is not None:
        waiting = waiting.join(TurnRow, TurnRow.turn_id == TurnTextRow.turn_id)
        waiting = waiting.where(TurnRow.scope == scope)
    return connection.scalar(select(func.count()).select_from(waiting.subquery())) or 0
