"""How earlier answers to the same prompt were rewarded: what a pass rate and a group are made of.

With live traffic hardly two turns of a batch have one prompt, so a turn is compared with what the
policy answered to it before, in the turn's own scope. It only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, select

from records.tables.models import IS_HELD_OUT, TokensRow, TurnRow, VerdictRow
from records.types import PastAnswer, PromptHistory

MOST = 256
"""Answers to one prompt that are read at most, from either end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryWindow:
    """What to read beside a batch: answers sampled at most `versions` versions before the newest of
    the batch and, with `first`, the first answers to each prompt, however old.
    """

    versions: int
    first: bool = False


def load_histories(
    connection: Connection, rows: Mapping[str, Row[Any]], window: HistoryWindow
) -> dict[str, PromptHistory]:
    """The history of the prompt of each turn, by turn id; `rows` are those of `turns`, the batch.

    Equal prompts are equal messages and tools of one scope. Turns of the batch are no history.
    """
    known = [row.newest_version for row in rows.values() if row.newest_version is not None]
    newest = max(known, default=0)
    batch = frozenset(rows)
    found: dict[tuple[str, str | None], PromptHistory] = {}
    for row in rows.values():
        prompt = (row.prompt_node_id, row.toolset_hash)
        if prompt not in found:
            found[prompt] = _history(connection, prompt, newest - window.versions, window, batch)
    return {turn_id: found[(row.prompt_node_id, row.toolset_hash)] for turn_id, row in rows.items()}


def _history(
    connection: Connection,
    prompt: tuple[str, str | None],
    oldest: int,
    window: HistoryWindow,
    batch: frozenset[str],
) -> PromptHistory:
    rewarded = _rewarded(*prompt)
    newest_first = (TurnRow.newest_version.desc(), TurnRow.created_at.desc(), TurnRow.turn_id)
    recent = rewarded.where(TurnRow.newest_version >= oldest).order_by(*newest_first)
    oldest_first = (TurnRow.newest_version, TurnRow.created_at, TurnRow.turn_id)
    first = rewarded.order_by(*oldest_first)
    return PromptHistory(
        recent=_answers(connection, recent, batch),
        first=_answers(connection, first, frozenset()) if window.first else (),
    )


def _rewarded(prompt_node_id: str, toolset_hash: str | None) -> Select[*tuple[Any, ...]]:
    """The policy's own rewarded answers to a prompt."""
    return (
        select(
            TurnRow.turn_id,
            TurnRow.newest_version.label("version"),
            VerdictRow.reward,
            TokensRow.response_length.label("length"),
        )
        .join(VerdictRow, VerdictRow.turn_id == TurnRow.turn_id)
        .join(TokensRow, TokensRow.turn_id == TurnRow.turn_id)
        .where(
            TurnRow.prompt_node_id == prompt_node_id,
            TurnRow.toolset_hash.is_not_distinct_from(toolset_hash),
            TurnRow.newest_version.is_not(None),
            TurnRow.distribution_modified.is_(None),
            VerdictRow.reward.is_not(None),
            ~IS_HELD_OUT,
        )
    )


def _answers(
    connection: Connection, statement: Select[*tuple[Any, ...]], batch: frozenset[str]
) -> tuple[PastAnswer, ...]:
    rows = connection.execute(statement.limit(MOST + len(batch)))
    kept = [row for row in rows if row.turn_id not in batch][:MOST]
    return tuple(
        PastAnswer(version=row.version, reward=row.reward, length=row.length) for row in kept
    )
