"""Outcomes of the sessions of a batch, and of earlier ones that began with the same prompt.

Two sessions are attempts at one task if their first turns have equal messages, tools and number of
prompt tokens, in one scope. It only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, select

from records.names import DropReason, TurnType
from records.outcomes.outcomes import outcomes_of
from records.outcomes.rows import OutcomeRow, OutcomeSource
from records.outcomes.values import values_of
from records.tables.models import IS_HELD_OUT, TokensRow, TurnRow
from records.tables.sql import rows_in
from records.training.history.equal_prompts import EqualPrompt
from records.training.history.prompts import MOST
from records.types import PastSession, SessionOutcome

_STARTS = (
    select(
        TurnRow.session_id,
        TurnRow.prompt_node_id,
        TurnRow.toolset_hash,
        TokensRow.prompt_length,
    )
    .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
    .where(
        TurnRow.session_id.in_(bindparam("values", expanding=True)),
        TurnRow.parent_turn_id.is_(None),
        TurnRow.turn_type == TurnType.MAIN,
    )
    .order_by(TurnRow.session_id, TurnRow.created_at, TurnRow.turn_id)
)


_NOT_TO_TRAIN = (DropReason.RECORD_ONLY, DropReason.FORGOTTEN, DropReason.SENSITIVE)


def load_sessions(
    connection: Connection,
    rows: Mapping[str, Row[Any]],
    versions: int | None,
    values: bool = False,
) -> dict[str, SessionOutcome]:
    """The facts of the session of each turn, by turn id; `rows` are those of `turns`, the batch.

    With `versions`, also earlier sessions whose first turn was sampled at most that many versions
    before the newest of the batch. With `values`, what the turns of each session were worth.
    """
    session_ids = list(dict.fromkeys(row.session_id for row in rows.values()))
    outcomes = outcomes_of(connection, session_ids)
    worth = values_of(connection, session_ids) if values else {}
    starts: dict[str, EqualPrompt] = {}
    for row in rows_in(connection, _STARTS, session_ids):
        starts.setdefault(
            row.session_id, EqualPrompt(row.prompt_node_id, row.toolset_hash, row.prompt_length)
        )
    known = [row.newest_version for row in rows.values() if row.newest_version is not None]
    past: dict[EqualPrompt, tuple[PastSession, ...]] = {}
    if versions is not None and known:
        past = {
            start: _past(connection, start, max(known) - versions, session_ids, values)
            for start in dict.fromkeys(starts.values())
        }
    facts: dict[str, SessionOutcome] = {}
    for turn_id, row in rows.items():
        start = starts.get(row.session_id)
        said = outcomes.get(row.session_id)
        facts[turn_id] = SessionOutcome(
            # The outcome does not cover a turn that came later.
            outcome=said[0] if said is not None and said[1] >= row.created_at else None,
            start="" if start is None else start.key,
            past=() if start is None else past.get(start, ()),
            values=worth.get(row.session_id, ()),
        )
    return facts


def _past(
    connection: Connection, start: EqualPrompt, oldest: int, batch: Sequence[str], values: bool
) -> tuple[PastSession, ...]:
    rows = connection.execute(
        _attempts(start)
        .where(
            TurnRow.newest_version >= oldest,
            TurnRow.distribution_modified.is_(None),
            TurnRow.drop_reason.is_(None) | TurnRow.drop_reason.not_in(_NOT_TO_TRAIN),
        )
        .order_by(TurnRow.newest_version.desc(), TurnRow.created_at.desc(), TurnRow.turn_id)
        .limit(MOST + len(batch))
    )
    found: dict[str, PastSession] = {}
    among = set(batch)
    for row in rows:
        if row.session_id not in among:
            found.setdefault(
                row.session_id,
                PastSession(session_id=row.session_id, version=row.version, outcome=row.value),
            )
    past = list(found.values())[:MOST]
    if values:
        worth = values_of(connection, [one.session_id for one in past])
        past = [replace(one, values=worth.get(one.session_id, ())) for one in past]
    return tuple(past)


def _attempts(start: EqualPrompt) -> Select[str, int | None, float | None]:
    """First turns of the sessions at a task whose outcome is known, with it."""
    return (
        select(TurnRow.session_id, TurnRow.newest_version.label("version"), OutcomeRow.value)
        .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
        .join(OutcomeRow, OutcomeRow.session_id == TurnRow.session_id)
        .where(
            start.is_of_turn(),
            TurnRow.parent_turn_id.is_(None),
            TurnRow.turn_type == TurnType.MAIN,
            OutcomeRow.value.is_not(None),
            ~IS_HELD_OUT,
        )
    )


def recorded_pass_rate(connection: Connection, session_id: str) -> float | None:
    """The mean outcome, in [0, 1], of the newest recorded sessions (at most MOST) at the task of
    this one; None if no outcome is known.
    """
    first = connection.execute(_STARTS, {"values": [session_id]}).first()
    if first is None:
        return None
    start = EqualPrompt(first.prompt_node_id, first.toolset_hash, first.prompt_length)
    rows = connection.execute(
        _attempts(start)
        .where(OutcomeRow.source == OutcomeSource.RECORDING)
        .order_by(TurnRow.created_at.desc(), TurnRow.turn_id)
        .limit(MOST)
    )
    outcomes = {row.session_id: row.value for row in rows}
    return sum(outcomes.values()) / len(outcomes) if outcomes else None
