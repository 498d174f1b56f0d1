"""How earlier answers to the same prompt were rewarded, for pass rates and groups.

With live traffic, hardly any two turns of a batch have the same prompt, so a turn is compared with
the policy's earlier answers to it, in the turn's own scope. It only reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, select

from records.outcomes.rows import OutcomeRow
from records.tables.models import IS_HELD_OUT, TokensRow, TurnRow, VerdictRow
from records.tables.sql import chunks
from records.training.history.equal_prompts import EqualPrompt
from records.training.history.window import HistoryWindow
from records.types import PastAnswer, PromptHistory

MOST = 256
"""Maximum answers to one prompt that are read from either end."""

_COVERED = and_(
    OutcomeRow.session_id == TurnRow.session_id, OutcomeRow.covers_until >= TurnRow.created_at
)
_COMPARABLE = (
    TurnRow.newest_version.is_not(None),
    TurnRow.distribution_modified.is_(None),
    ~IS_HELD_OUT,
)


def load_histories(
    connection: Connection,
    rows: Mapping[str, Row[Any]],
    lengths: Mapping[str, int],
    window: HistoryWindow,
) -> dict[str, PromptHistory]:
    """The history of the prompt of each turn, by turn id; `rows` are those of `turns`, the batch,
    and `lengths` the tokens of their prompts.

    Turns of the batch are not history. There is none if the versions of all of them are unknown.
    """
    known = [row.newest_version for row in rows.values() if row.newest_version is not None]
    if not known:
        return {}
    oldest, batch = max(known) - window.versions, frozenset(rows)
    prompts = {
        turn_id: EqualPrompt(row.prompt_node_id, row.toolset_hash, lengths[turn_id])
        for turn_id, row in rows.items()
    }
    found = {
        prompt: _history(connection, prompt, oldest, window, batch)
        for prompt in dict.fromkeys(prompts.values())
    }
    return {turn_id: found[prompt] for turn_id, prompt in prompts.items()}


def _history(
    connection: Connection,
    prompt: EqualPrompt,
    oldest: int,
    window: HistoryWindow,
    batch: frozenset[str],
) -> PromptHistory:
    rewarded = _rewarded(prompt, by_outcome=window.outcomes)
    newest_first = (TurnRow.newest_version.desc(), TurnRow.created_at.desc(), TurnRow.turn_id)
    recent = rewarded.where(TurnRow.newest_version >= oldest).order_by(*newest_first)
    oldest_first = (TurnRow.newest_version, TurnRow.created_at, TurnRow.turn_id)
    first = rewarded.order_by(*oldest_first)
    return PromptHistory(
        recent=_answers(connection, recent, batch),
        first=_answers(connection, first, frozenset()) if window.first else (),
    )


def _rewarded(prompt: EqualPrompt, *, by_outcome: bool) -> Select[*tuple[Any, ...]]:
    """The policy's own rewarded answers to a prompt."""
    reward = OutcomeRow.value if by_outcome else VerdictRow.reward
    return (
        select(
            TurnRow.turn_id,
            TurnRow.newest_version.label("version"),
            VerdictRow.reward,
            TokensRow.response_length.label("length"),
            OutcomeRow.value.label("outcome"),
        )
        .outerjoin(OutcomeRow, _COVERED)
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
        .where(
            prompt.is_of_turn(),
            reward.is_not(None),
            *_COMPARABLE,
        )
    )


def _answers(
    connection: Connection, statement: Select[*tuple[Any, ...]], batch: frozenset[str]
) -> tuple[PastAnswer, ...]:
    rows = connection.execute(statement.limit(MOST + len(batch)))
    kept = [row for row in rows if row.turn_id not in batch][:MOST]
    return tuple(
        PastAnswer(
            turn_id=row.turn_id,
            version=row.version,
            reward=row.reward,
            length=row.length,
            outcome=row.outcome,
        )
        for row in kept
    )


def num_answers(connection: Connection, turn_ids: Sequence[str]) -> int:
    """How many of these turns pass rates and group statistics may count: answers with a reward or
    an outcome.
    """
    return sum(
        connection.scalar(
            select(func.count())
            .select_from(TurnRow)
            .outerjoin(OutcomeRow, _COVERED)
            .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
            .where(
                TurnRow.turn_id.in_(part),
                VerdictRow.reward.is_not(None) | OutcomeRow.value.is_not(None),
                *_COMPARABLE,
            )
        )
        or 0
        for part in chunks(turn_ids)
    )
