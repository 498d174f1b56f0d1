"""Writes to the hint memory: hints of accepted verdicts, and what becomes of them.

A hint enters in the transaction of its verdict, so it survives whatever happens to the turn: one
that is too old to train by now has still shown what its user wants. For each text, a scope has one
hint that holds; each further turn with that text is a further source of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)

from records.feedback.feedback import load as load_feedback
from records.hints.pausing import lift
from records.hints.rows import HintPromptRow, HintRow, HintSourceRow, HintStateRow
from records.hints.types import LIVE_STATUSES, HintStatus, RehearsalBlock
from records.lessons.dropping import erase_of_hint
from records.messages import Message, content_text
from records.tables.columns import clean_text
from records.tables.models import IS_HELD_OUT, TurnRow
from records.tables.sql import chunks, insert_missing, rows_in, upsert
from records.types import Verdict

MAX_WORDS_CHARS = 2000
"""Maximum length of a source's words; the rest is cut off."""
MAX_TEXTS = 48
"""A hint with this many texts for its exceptions gets no more."""
MOST_ASKED = 8
"""In the words of up to this many sessions, the judge looks for a rule."""
_UNASKED = (RehearsalBlock.NO_MAJORITY, RehearsalBlock.NOT_EXAMINED)

_TURNS = select(
    TurnRow.turn_id, TurnRow.session_id, TurnRow.scope, TurnRow.next_state, TurnRow.created_at
).where(TurnRow.turn_id.in_(bindparam("values", expanding=True)), ~IS_HELD_OUT)
_BY_KEY = select(HintRow.hint_id, HintRow.scope, HintRow.text_key).where(
    HintRow.text_key.in_(bindparam("values", expanding=True))
)


def text_key(text: str) -> str:
    """Identifies a hint's text, regardless of case and spacing. Hex SHA-256."""
    plain = " ".join(clean_text(text).casefold().split())
    return hashlib.sha256(plain.encode()).hexdigest()


def remember(connection: Connection, verdicts: Sequence[Verdict], now: float) -> None:
    """Store the accepted hint of each verdict: as a new hint, or as one more source of an existing
    one. A held-out recording is only measured and teaches nothing, so its hint is not kept.
    """
    before = _forget_sources(connection, [one.turn_id for one in verdicts])
    _add_sources(connection, verdicts, now)
    _keep_states(connection, before)
    end_sourceless(connection, before.keys(), now)


def _add_sources(connection: Connection, verdicts: Sequence[Verdict], now: float) -> None:
    by_turn = {one.turn_id: one for one in verdicts if one.hint}
    if not by_turn:
        return
    turns = {row.turn_id: row for row in rows_in(connection, _TURNS, by_turn)}
    feedback = load_feedback(connection, list(turns))
    wanted = {turn_id: (turn.scope, by_turn[turn_id].hint or "") for turn_id, turn in turns.items()}
    ids = add_hints(connection, wanted, now)
    sources = []
    for turn_id, turn in turns.items():
        verdict = by_turn[turn_id]
        said = [*(turn.next_state or ()), *feedback.get(turn_id, ([], None))[0]]
        sources.append(
            {
                "hint_id": ids[turn_id],
                "turn_id": turn_id,
                "session_id": turn.session_id,
                "text": verdict.hint,
                "words": words_of(said),
                "num_votes": len(verdict.votes),
                "num_positive": sum(vote.score == 1 for vote in verdict.votes),
                # Not the verdict's time: turns are judged newest first.
                "created_at": turn.created_at,
            }
        )
    upsert(connection, HintSourceRow, sources)
    look_again(connection, {source["hint_id"] for source in sources})


def add_hints(
    connection: Connection, wanted: Mapping[str, tuple[str, str]], now: float
) -> dict[str, str]:
    """By turn, the id of the hint that its scope has with that text, inserted if it is new;
    `wanted` is (scope, text) by turn.
    """
    rows = [_hint_row(scope, text, turn_id, now) for turn_id, (scope, text) in wanted.items()]
    if rows:
        insert_missing(connection, HintRow, rows)
    keys = {turn_id: (scope, text_key(text)) for turn_id, (scope, text) in wanted.items()}
    found = rows_in(connection, _BY_KEY, [key for _, key in keys.values()])
    ids = {(row.scope, row.text_key): row.hint_id for row in found}
    return {turn_id: ids[key] for turn_id, key in keys.items()}


def look_again(connection: Connection, hint_ids: Iterable[str]) -> None:
    """Reconsider hints that lacked votes, a judge or usable texts, or that seemed to be meant for
    one answer: a further source may provide them. This ends at a number of texts, however useful
    they were, and at a number of sessions in which a rule was looked for, however many came at a
    time: what is not a rule in the words of many users is none. A hint that was given up (`stuck`)
    is practised again: its user still objects.
    """
    texts = _number(HintPromptRow, HintPromptRow.prompt_id)
    lacks_texts = and_(HintRow.block == RehearsalBlock.NO_COUNTER_LESSONS, texts < MAX_TEXTS)
    for part in chunks(sorted(hint_ids)):
        connection.execute(
            update(HintRow)
            .where(
                HintRow.hint_id.in_(part),
                or_(HintRow.block.in_(_UNASKED), lacks_texts, _was_repeated()),
            )
            .values(is_rule=None, block=None)
        )
        connection.execute(
            update(HintRow)
            .where(HintRow.hint_id.in_(part), HintRow.status == HintStatus.STUCK)
            .values(status=HintStatus.ACTIVE, detail=None)
        )


def look_again_if_repeated(connection: Connection, hint_id: str) -> None:
    """Reconsider a hint that seemed to be meant for one answer, if it was given in more sessions
    while it was examined.
    """
    one = update(HintRow).where(HintRow.hint_id == hint_id, _was_repeated())
    connection.execute(one.values(is_rule=None, block=None))


def _was_repeated() -> ColumnElement[bool]:
    sessions = _number(HintSourceRow, HintSourceRow.session_id)
    return and_(
        HintRow.block.in_((RehearsalBlock.NOT_A_RULE, RehearsalBlock.UNCONFIRMED)),
        HintRow.sessions_asked < MOST_ASKED,
        sessions > HintRow.sessions_asked,
    )


def _number(model: type[HintPromptRow] | type[HintSourceRow], column: Any) -> Any:
    """Number of different values of a column among a hint's rows."""
    number = select(func.count(column.distinct())).where(model.hint_id == HintRow.hint_id)
    return number.correlate(HintRow).scalar_subquery()


def words_of(next_state: Iterable[Message]) -> str:
    """What the user and the tools said, one message per line, cut to `MAX_WORDS_CHARS`."""
    texts = (content_text(message.get("content")).strip() for message in next_state)
    return "\n".join(text for text in texts if text)[:MAX_WORDS_CHARS]


def _hint_row(scope: str, text: str, turn_id: str, now: float) -> dict[str, Any]:
    return {
        "hint_id": f"hint_{uuid4().hex}",
        "scope": scope,
        "text": text,
        "text_key": text_key(text),
        "origin_turn_id": turn_id,
        "status": HintStatus.ACTIVE,
        "detail": None,
        "created_at": now,
        "updated_at": now,
        "claim_owner": None,
        "claim_until": None,
        "is_rule": None,
        "block": None,
        "opposed_by": None,
        "merged_into": None,
        "first_gap": None,
        "gap": None,
        "gap_high": None,
        "trained_since": None,
        "num_steps": 0,
    }


def _forget_sources(connection: Connection, turn_ids: Sequence[str]) -> dict[str, list[str]]:
    """Remove the sources of turns that are judged again; returns these turns, by the hints that
    they gave. The hints are still there, so one that is given again keeps its measurements.
    """
    given: dict[str, list[str]] = {}
    for part in chunks(turn_ids):
        among = HintSourceRow.turn_id.in_(part)
        found = connection.execute(
            select(HintSourceRow.hint_id, HintSourceRow.turn_id).where(among)
        ).all()
        for row in found:
            given.setdefault(row.hint_id, []).append(row.turn_id)
        if found:
            connection.execute(delete(HintSourceRow).where(among))
    return given


def _keep_states(connection: Connection, given: Mapping[str, Sequence[str]]) -> None:
    """Keep the turns of hints that taught and lost all sources, as states for unlearning them."""
    for hint_id, turn_ids in given.items():
        has_sources = exists().where(HintSourceRow.hint_id == HintRow.hint_id)
        ends = select(HintRow.hint_id).where(
            HintRow.hint_id == hint_id, HintRow.trained_since.is_not(None), ~has_sources
        )
        if connection.scalar(ends) is not None:
            states = [
                {"hint_id": hint_id, "turn_id": turn_id, "held_out": False} for turn_id in turn_ids
            ]
            insert_missing(connection, HintStateRow, states)


def forget_turns(connection: Connection, turn_ids: Sequence[str], now: float) -> None:
    """Take these turns out of the memory: sources, states, and hints that came from them alone.

    A hint with other sources stays, with the text of its oldest other source if its own text came
    from one of these turns; what was written from their words is deleted, and the hint is examined
    again.
    """
    for part in chunks(turn_ids):
        connection.execute(delete(HintStateRow).where(HintStateRow.turn_id.in_(part)))
    touched = _take_sources(connection, turn_ids)
    gone = end_sourceless(connection, touched, now)
    left = sorted(touched - set(gone))
    _tell_anew(connection, left, set(turn_ids), now)
    for hint_id in left:
        _write_anew(connection, hint_id, now)


def take_back(connection: Connection, turn_ids: Sequence[str], now: float) -> None:
    """Stop using these turns as sources. Like `forget_turns`, but they stay states, and what was
    written from their words stays if the hint's text does.
    """
    touched = _take_sources(connection, turn_ids)
    gone = end_sourceless(connection, touched, now)
    _tell_anew(connection, sorted(touched - set(gone)), set(turn_ids), now)


def _take_sources(connection: Connection, turn_ids: Sequence[str]) -> set[str]:
    """Delete these turns from the sources; returns the hints that had them as source or origin."""
    touched: set[str] = set()
    for part in chunks(turn_ids):
        of_turns = HintSourceRow.turn_id.in_(part)
        touched.update(connection.scalars(select(HintSourceRow.hint_id).where(of_turns)))
        origins = select(HintRow.hint_id).where(HintRow.origin_turn_id.in_(part))
        touched.update(connection.scalars(origins))
        connection.execute(delete(HintSourceRow).where(of_turns))
    return touched


def end_sourceless(connection: Connection, hint_ids: Iterable[str], now: float) -> list[str]:
    """Remove those of these hints that have no source left, with their texts and lessons. If one
    was trained on and has states left, its row and they stay, as for a deleted hint: what it taught
    has to be unlearned there. Returns the ids of the removed hints.
    """
    gone: list[str] = []
    for part in chunks(sorted(hint_ids)):
        kept = set(
            connection.scalars(
                select(HintSourceRow.hint_id).where(HintSourceRow.hint_id.in_(part)).distinct()
            )
        )
        gone += [hint_id for hint_id in part if hint_id not in kept]
    for part in chunks(gone):
        connection.execute(delete(HintPromptRow).where(HintPromptRow.hint_id.in_(part)))
        connection.execute(
            update(HintRow)
            .where(HintRow.merged_into.in_(part))
            .values(merged_into=None, text="", detail=None)
        )
        lift(connection, part, now)
        for hint_id in part:
            erase_of_hint(connection, hint_id, now)
        _end(connection, part, now)
    return gone


def _end(connection: Connection, hint_ids: Sequence[str], now: float) -> None:
    """Delete the rows of hints without a source, or only their text if they were trained on."""
    of_them = HintRow.hint_id.in_(hint_ids)
    # What a merged hint taught still holds: another has its sources.
    has_taught = and_(
        HintRow.trained_since.is_not(None),
        HintRow.status != HintStatus.MERGED,
        exists().where(HintStateRow.hint_id == HintRow.hint_id),
    )
    connection.execute(
        update(HintRow)
        .where(of_them, has_taught)
        .values(
            text="",
            text_key=None,
            detail=None,
            status=HintStatus.DELETED,
            merged_into=None,
            block=None,
            opposed_by=None,
            origin_turn_id=None,
            claim_owner=None,
            claim_until=None,
            updated_at=now,
        )
    )
    others = list(connection.scalars(select(HintRow.hint_id).where(of_them, ~has_taught)))
    connection.execute(delete(HintStateRow).where(HintStateRow.hint_id.in_(others)))
    connection.execute(delete(HintRow).where(HintRow.hint_id.in_(others)))


def _tell_anew(
    connection: Connection, hint_ids: Sequence[str], forgotten: set[str], now: float
) -> None:
    """Give hints whose own text came from a forgotten turn the text of their oldest source."""
    for hint_id in hint_ids:
        row = connection.execute(
            select(HintRow.origin_turn_id, HintRow.scope, HintRow.status).where(
                HintRow.hint_id == hint_id
            )
        ).one_or_none()
        if row is None or row.origin_turn_id not in forgotten:
            continue
        source = connection.execute(
            select(HintSourceRow.text, HintSourceRow.turn_id)
            .where(HintSourceRow.hint_id == hint_id)
            .order_by(HintSourceRow.created_at, HintSourceRow.turn_id)
            .limit(1)
        ).one()
        holds = row.status in LIVE_STATUSES
        key = text_key(source.text) if holds else None
        if key is not None and _other_with(connection, row.scope, key, hint_id):
            key = None  # the scope already has this text
        _write_anew(connection, hint_id, now)
        connection.execute(
            update(HintRow)
            .where(HintRow.hint_id == hint_id)
            .values(text=source.text, origin_turn_id=source.turn_id, text_key=key)
        )


def _write_anew(connection: Connection, hint_id: str, now: float) -> None:
    """Let a hint be examined again, without what was written and taught from deleted words."""
    connection.execute(delete(HintPromptRow).where(HintPromptRow.hint_id == hint_id))
    erase_of_hint(connection, hint_id, now)
    connection.execute(
        update(HintRow)
        .where(HintRow.hint_id == hint_id)
        .values(is_rule=None, block=None, detail=None)
    )


def _other_with(connection: Connection, scope: str, key: str, hint_id: str) -> bool:
    statement = select(HintRow.hint_id).where(
        HintRow.scope == scope, HintRow.text_key == key, HintRow.hint_id != hint_id
    )
    return connection.scalar(statement) is not None
