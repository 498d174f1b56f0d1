"""Side samples as rows and back: one set per turn, the one that was saved last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from records.errors import UnknownTurn
from records.tables.models import SideSamplesRow, TokensRow
from records.tables.sql import chunks, upsert
from records.types import SideSamples


def save_op(connection: Connection, turn_id: str, samples: SideSamples, now: float) -> None:
    """Store `samples`, in place of earlier ones. Raises UnknownTurn; ValueError for another R."""
    length = connection.scalar(
        select(TokensRow.response_length).where(TokensRow.turn_id == turn_id)
    )
    if length is None:
        raise UnknownTurn(turn_id)
    samples.check(turn_id, length)
    upsert(connection, SideSamplesRow, [side_row(turn_id, samples, now)])


def side_row(turn_id: str, samples: SideSamples, now: float) -> dict[str, Any]:
    """Side samples that fit their turn, as a row."""
    return {
        "turn_id": turn_id,
        "policy_version": samples.policy_version,
        "source": samples.source,
        "num_samples": samples.ids.shape[1],
        "ids": samples.ids.ravel(),
        "rollout_logprobs": samples.rollout_logprobs.ravel(),
        "teacher_logprobs": samples.teacher_logprobs.ravel(),
        "created_at": now,
    }


def load_side_samples(connection: Connection, turn_ids: Sequence[str]) -> dict[str, SideSamples]:
    """The side samples of those turns that have any."""
    found: dict[str, SideSamples] = {}
    for part in chunks(turn_ids):
        statement = select(SideSamplesRow.__table__).where(SideSamplesRow.turn_id.in_(part))
        found.update((row.turn_id, _samples(row)) for row in connection.execute(statement))
    return found


def _samples(row: Row[Any]) -> SideSamples:
    shape = (-1, row.num_samples)
    return SideSamples(
        ids=row.ids.reshape(shape),
        rollout_logprobs=row.rollout_logprobs.reshape(shape),
        teacher_logprobs=row.teacher_logprobs.reshape(shape),
        policy_version=row.policy_version,
        source=row.source,
    )
