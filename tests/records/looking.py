"""What only tests ask of a store."""

from __future__ import annotations

from sqlalchemy import Connection, exists, select

from records.feedback.feedback import KeptFeedback, kept_on
from records.names import TurnState
from records.reading.summary import _votes
from records.reading.summary import verdict_of as _verdict_of
from records.store import Store
from records.tables.models import PolicyVersionRow, TurnRow
from records.turns.linking import _REFS, _ref
from records.types import TurnRef, Verdict, Vote


async def votes_of(store: Store, turn_id: str) -> tuple[Vote, ...]:
    """The votes on a turn, by index."""
    found = await store.read(_votes, turn_ids=[turn_id])
    return found.get(turn_id, ())


async def verdict_of(store: Store, turn_id: str) -> Verdict | None:
    """The verdict on a turn, with its votes."""
    return await store.read(_verdict_of, turn_id=turn_id)


async def feedback_of(store: Store, turn_id: str) -> list[KeptFeedback]:
    """The feedback on a turn, oldest first."""
    return await store.read(kept_on, turn_ids=[turn_id])


async def sampled_from_abandoned(store: Store) -> list[str]:
    """Turns with tokens of a policy version that did not survive, oldest first."""
    return await store.read(_sampled_from_abandoned)


async def list_turns(
    store: Store, session_id: str | None = None, state: TurnState | None = None, limit: int = 100
) -> list[TurnRef]:
    """The newest `limit` turns of a session and/or state, newest first."""
    return await store.read(_list_turns, session_id=session_id, state=state, limit=limit)


def _sampled_from_abandoned(connection: Connection) -> list[str]:
    abandoned = exists().where(
        PolicyVersionRow.abandoned.is_(True),
        PolicyVersionRow.version.between(TurnRow.oldest_version, TurnRow.newest_version),
    )
    statement = select(TurnRow.turn_id).where(abandoned).order_by(TurnRow.created_at)
    return list(connection.scalars(statement))


def _list_turns(
    connection: Connection, session_id: str | None, state: TurnState | None, limit: int
) -> list[TurnRef]:
    conditions = []
    if session_id is not None:
        conditions.append(TurnRow.session_id == session_id)
    if state is not None:
        conditions.append(TurnRow.state == state)
    statement = _REFS.where(*conditions)
    newest = statement.order_by(TurnRow.created_at.desc(), TurnRow.turn_id).limit(limit)
    return [_ref(row) for row in connection.execute(newest)]
