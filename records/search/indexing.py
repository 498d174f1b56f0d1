"""Texts of turns into the index, and out of it.

Recording a turn only notes that its text is not indexed yet; `index_op` follows in a transaction of
its own. What a turn adds to its conversation is indexed with it: its messages after the previous
answer (system messages are left out) and its answer, in its own form.

The index is FTS5 in SQLite (parts.py), and in PostgreSQL the table `turn_words` with a tsvector,
which only this module and finding.py know. Its rows have the numbers of `turn_texts`. Each begins
with a word that stands for its scope, so that a tenant's search costs, and tells, nothing of other
tenants' turns.

A text that cannot be indexed takes its place with a word that no text contains, so that those after
it are indexed and a search can count it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, text, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from records.database.database import is_ailing
from records.errors import StoreError
from records.messages import Message, content_text
from records.search import parts
from records.search.words import LONGEST_WORD, words_of
from records.tables.models import IS_NOT_INDEXED, NodeRow, TurnRow, TurnTextRow, VariantRow
from records.tables.sql import chunks, rows_in, table_of

_NOTE = table_of(TurnTextRow).insert()
_MOST_MESSAGES = 64
"""Number of newest messages of a turn that are indexed."""
REFUSED_WORD = "refused".ljust(LONGEST_WORD + 1, "x")
"""Stands for a text that cannot be indexed: one character longer than any word of a text."""
_MOST_SAID = 200
_WAITING = (
    select(TurnTextRow.number, TurnTextRow.turn_id)
    .where(IS_NOT_INDEXED)
    .order_by(TurnTextRow.number)
)
_TURNS = select(
    TurnRow.turn_id, TurnRow.parent_turn_id, TurnRow.response_node_id, TurnRow.variants
).where(TurnRow.turn_id.in_(bindparam("values", expanding=True)))
_SCOPES = select(TurnRow.turn_id, TurnRow.scope).where(
    TurnRow.turn_id.in_(bindparam("values", expanding=True))
)
_ANSWERS = select(TurnRow.turn_id, TurnRow.response_node_id).where(
    TurnRow.turn_id.in_(bindparam("values", expanding=True))
)
_FORMS = select(VariantRow.body_hash, VariantRow.body).where(
    VariantRow.body_hash.in_(bindparam("values", expanding=True))
)
_NODES = select(NodeRow.node_id, NodeRow.parent_id, NodeRow.depth, NodeRow.body).where(
    NodeRow.node_id.in_(bindparam("values", expanding=True))
)


def note_turns(connection: Connection, turn_ids: Iterable[str]) -> None:
    """Note that the text of these new turns is not indexed yet."""
    connection.execute(_NOTE, [{"turn_id": one, "is_indexed": False} for one in turn_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWords:
    """What is indexed of a turn. A number alone does not tell which: SQLite gives the largest one
    again after its turn was deleted.
    """

    number: int
    turn_id: str
    words: str


class RefusalReason(StrEnum):
    """Why the text of a turn cannot be indexed."""

    UNREADABLE = "unreadable"
    """Its messages are not what this program stores."""
    DATABASE = "database"
    """The database refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedText:
    """A turn whose text cannot be indexed. `detail` is the error, without the text."""

    turn_id: str
    reason: RefusalReason
    detail: str


def refusal_of(error: Exception, turn_id: str) -> RefusedText | None:
    """What an error says about the one text that was read or indexed; None: nothing, as the
    database itself is in trouble.
    """
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, DBAPIError):
        if is_ailing(cause):
            return None
        # Of the error itself: with its statement, the text would be in the log.
        said = (str(cause.orig).splitlines() or [""])[0][:_MOST_SAID]
        return RefusedText(turn_id=turn_id, reason=RefusalReason.DATABASE, detail=said)
    if cause is None or isinstance(cause, StoreError | SQLAlchemyError | OSError | MemoryError):
        return None
    name = type(cause).__name__
    return RefusedText(turn_id=turn_id, reason=RefusalReason.UNREADABLE, detail=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTurn:
    """A turn that is not indexed yet."""

    number: int
    turn_id: str


def waiting_turns(connection: Connection, limit: int) -> list[WaitingTurn]:
    """Up to `limit` turns that are not indexed yet, those that waited longest first."""
    rows = connection.execute(_WAITING.limit(limit))
    return [WaitingTurn(number=row.number, turn_id=row.turn_id) for row in rows]


def waiting_texts(connection: Connection, limit: int) -> list[TurnWords]:
    """As `waiting_turns`, with their words."""
    return words_of_turns(connection, waiting_turns(connection, limit))


def words_of_turns(connection: Connection, waiting: Sequence[WaitingTurn]) -> list[TurnWords]:
    """What is indexed of these turns, except for those that were deleted meanwhile."""
    turn_ids = [one.turn_id for one in waiting]
    texts = turn_texts(connection, turn_ids)
    scopes = {row.turn_id: row.scope for row in rows_in(connection, _SCOPES, turn_ids)}
    return [
        TurnWords(
            number=one.number,
            turn_id=one.turn_id,
            words=f"{scope_word(scopes[one.turn_id])} {words_of(texts[one.turn_id])}",
        )
        for one in waiting
        # One may have been deleted since the first of these queries.
        if one.turn_id in scopes and one.turn_id in texts
    ]


def scope_word(scope: str) -> str:
    """The word that stands for a scope in the index."""
    return f"scope{hashlib.sha256(scope.encode()).hexdigest()[:24]}"


def index_op(connection: Connection, texts: Sequence[TurnWords]) -> int:
    """Index these; returns how many. Those that another process has indexed, or that were deleted
    meanwhile, are left out.
    """
    still = {
        (row.number, row.turn_id)
        for row in connection.execute(
            select(TurnTextRow.number, TurnTextRow.turn_id)
            .where(TurnTextRow.number.in_([one.number for one in texts]), IS_NOT_INDEXED)
            .with_for_update()
        )
    }
    words = {one.number: one.words for one in texts if (one.number, one.turn_id) in still}
    if words:
        _insert(connection, words)
        done = TurnTextRow.number.in_(words)
        connection.execute(update(TurnTextRow).where(done).values(is_indexed=True))
    return len(words)


def refuse_op(connection: Connection, turn: WaitingTurn) -> bool:
    """Index a turn as one whose text cannot be indexed; False if it was deleted meanwhile, or
    another process indexed it. It shows, too, that the database takes any text for this turn.
    """
    scopes = rows_in(connection, _SCOPES, [turn.turn_id])
    words = [
        TurnWords(
            number=turn.number,
            turn_id=turn.turn_id,
            words=f"{scope_word(row.scope)} {REFUSED_WORD}",
        )
        for row in scopes
    ]
    return bool(index_op(connection, words))


def forget_texts(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Delete turns from the index. With SQLite, `parts.shrink_op` must follow."""
    for part in chunks(turn_ids):
        mine = TurnTextRow.turn_id.in_(part)
        # One that is being indexed first waits until it is.
        rows = select(TurnTextRow.number).where(mine).with_for_update()
        numbers = list(connection.scalars(rows))
        if connection.dialect.name == "sqlite":
            parts.delete(connection, numbers)
        elif numbers:
            gone = text("DELETE FROM turn_words WHERE number IN :numbers").bindparams(
                bindparam("numbers", expanding=True)
            )
            connection.execute(gone, {"numbers": numbers})
        connection.execute(delete(TurnTextRow).where(mine))


def turn_texts(connection: Connection, turn_ids: Sequence[str]) -> dict[str, str]:
    """What each of these turns adds to its conversation, as text."""
    turns = rows_in(connection, _TURNS, turn_ids)
    parents = [one.parent_turn_id for one in turns if one.parent_turn_id is not None]
    answers = {row.turn_id: row.response_node_id for row in rows_in(connection, _ANSWERS, parents)}
    added = _added(
        connection,
        {one.turn_id: one.response_node_id for one in turns},
        {one.turn_id: answers.get(one.parent_turn_id) for one in turns},
    )
    hashes = {value for one in turns for value in (one.variants or {}).values()}
    forms = {row.body_hash: row.body for row in rows_in(connection, _FORMS, hashes)}
    return {
        one.turn_id: "\n".join(
            _text(forms.get((one.variants or {}).get(str(node.depth)), node.body))
            for node in added[one.turn_id]
        )
        for one in turns
    }


def _added(
    connection: Connection, leaves: dict[str, str], stops: dict[str, str | None]
) -> dict[str, list[Any]]:
    """The nodes from each turn's leaf upwards, until its stop; in the order of the conversation."""
    nodes: dict[str, Any] = {}
    found: dict[str, list[Any]] = {turn_id: [] for turn_id in leaves}
    here = dict(leaves)
    for _ in range(_MOST_MESSAGES + 1):
        missing = sorted(set(here.values()) - nodes.keys())
        nodes.update((row.node_id, row) for row in rows_in(connection, _NODES, missing))
        # Messages of a turn that was just deleted are not there any more.
        here = {turn_id: node_id for turn_id, node_id in here.items() if node_id in nodes}
        for turn_id, node_id in here.items():
            found[turn_id].insert(0, nodes[node_id])
        above = ((turn_id, nodes[node_id].parent_id) for turn_id, node_id in here.items())
        here = {turn_id: one for turn_id, one in above if one not in (None, stops[turn_id])}
    return found


def _text(message: Message) -> str:
    if message["role"] in ("system", "developer"):
        return ""
    said = [content_text(message.get("content"))]
    for call in message.get("tool_calls") or ():
        said += [str(call["function"]["name"]), str(call["function"].get("arguments", ""))]
    return "\n".join(said)


def _insert(connection: Connection, words: Mapping[int, str]) -> None:
    if connection.dialect.name == "sqlite":
        parts.insert(connection, words)
        return
    connection.execute(
        text(
            "INSERT INTO turn_words(number, words) VALUES (:number, to_tsvector('simple', :words))"
        ),
        [{"number": number, "words": said} for number, said in words.items()],
    )
