"""Every operation on a turn in every state: which move it, which leave it alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import Connection, delete, update

from records.errors import StoreConflict
from records.feedback.reviews import HintDecision
from records.names import DropReason, TurnState
from records.store import Store
from records.tables.models import PolicyVersionRow, SampleRow, TurnRow
from records.training import agreements
from tests.records.builders import (
    OWNER,
    REPLY,
    TRAINER,
    a_result,
    a_score,
    a_verdict,
    a_version,
    recorded,
    state_of,
    turn_in,
)

AWAITING, JUDGING, REVIEWING, SCORING, READY, LEASED, TRAINED, DROPPED = TurnState

Action = Callable[[Store, str], Awaitable[object]]


async def close(store: Store, turn_id: str) -> object:
    turn = await store.turn(turn_id)
    assert turn is not None
    return await store.close_session(turn.session_id, "done")


async def commit_step(store: Store, turn_id: str) -> object:
    try:
        await store.commit_step(version=a_version(77), results=[a_result(turn_id)])
    except StoreConflict:
        return False
    return True


async def _decided(store: Store, turn_id: str, *, is_approved: bool) -> object:
    [waiting] = await store.proposals() or [None]
    answer = HintDecision(
        turn_id=turn_id,
        judged_at=0.0 if waiting is None else waiting.judged_at,
        is_approved=is_approved,
        hint=None,
        author="a person",
    )
    try:
        return await store.review(answer) is not None
    except StoreConflict:
        return False


ACTIONS: dict[str, tuple[Action, dict[TurnState, TurnState]]] = {
    "set_next_state": (lambda s, t: s.set_next_state(t, [REPLY]), {AWAITING: JUDGING}),
    "close_session": (close, {AWAITING: DROPPED}),
    "commit_verdict": (
        lambda s, t: s.commit_verdict(OWNER, a_verdict(t), None),
        {JUDGING: SCORING},
    ),
    "commit_verdict, to be reviewed": (
        lambda s, t: s.commit_verdict(OWNER, a_verdict(t), None, review=True),
        {JUDGING: REVIEWING},
    ),
    "commit_verdict without hint": (
        lambda s, t: s.commit_verdict(OWNER, a_verdict(t, None), DropReason.NO_HINT),
        {JUDGING: DROPPED},
    ),
    "approve": (lambda s, t: _decided(s, t, is_approved=True), {REVIEWING: SCORING}),
    "reject": (lambda s, t: _decided(s, t, is_approved=False), {REVIEWING: DROPPED}),
    "commit_score": (lambda s, t: s.commit_scores(OWNER, [a_score(t)]), {SCORING: READY}),
    "drop by worker": (
        lambda s, t: s.drop(OWNER, t, DropReason.TEACHER_MISALIGNED),
        {JUDGING: DROPPED, SCORING: DROPPED},
    ),
    "drop by trainer": (
        lambda s, t: s.drop(TRAINER, t, DropReason.BELOW_NOISE, "too small"),
        {LEASED: DROPPED},
    ),
    "lease": (lambda s, t: s.lease(owner=TRAINER, count=1, ttl_s=60.0), {READY: LEASED}),
    "expire_stale": (
        lambda s, t: s.expire_stale(oldest_allowed=5),
        {READY: DROPPED},
    ),
    "release_leases": (lambda s, t: s.release_leases(TRAINER), {LEASED: READY}),
    "commit_step": (commit_step, {LEASED: TRAINED}),
    "reconcile with nothing": (lambda s, t: s.reconcile([]), {LEASED: READY, TRAINED: READY}),
    "reconcile with the turn": (
        lambda s, t: s.reconcile([(a_version(78), [t])]),
        dict.fromkeys(TurnState, TRAINED),
    ),
}


def _forget(connection: Connection) -> None:
    """Take all turns and versions out of the way of the next round."""
    connection.execute(delete(SampleRow))
    # Versions of the next round have the same hashes, and other turns.
    agreements.forget(connection)
    values = {"state": DROPPED, "drop_reason": DropReason.ABORTED, "trained_version": None}
    connection.execute(update(TurnRow).values(values))
    connection.execute(delete(PolicyVersionRow))


@pytest.mark.parametrize("action", ACTIONS)
async def test_each_action_moves_exactly_the_states_that_it_should(
    store: Store, action: str
) -> None:
    act, moves = ACTIONS[action]
    for state in TurnState:
        turn_id = await turn_in(store, state)
        outcome = await act(store, turn_id)
        assert await state_of(store, turn_id) is moves.get(state, state), state
        if isinstance(outcome, bool | int | list) and state is not TRAINED:
            assert bool(outcome) == (state in moves), state
        await store.writer.run(_forget)


async def test_a_stranger_moves_nothing(store: Store) -> None:
    for state in TurnState:
        turn_id = await turn_in(store, state)
        assert not await store.commit_verdict("stranger", a_verdict(turn_id), None)
        assert not await store.commit_scores("stranger", [a_score(turn_id)])
        assert not await store.drop("stranger", turn_id, DropReason.NO_HINT)
        assert await store.release("stranger", [turn_id]) == 0
        assert await store.extend_claims("stranger", [turn_id], 60.0) == 0
        assert await store.release_leases("stranger") == 0
        assert await state_of(store, turn_id) is state
        await store.writer.run(_forget)


async def test_only_a_missing_next_state_can_be_made_good(store: Store) -> None:
    turn_id = await recorded(store)
    assert await close(store, turn_id) == 1
    assert await store.drops() == {DropReason.NO_NEXT_STATE: 1}
    assert await store.set_next_state(turn_id, [REPLY])
    turn = await store.turn(turn_id)
    assert turn is not None
    assert (turn.state, turn.drop_reason, turn.next_state) == (JUDGING, None, [REPLY])
    assert not await store.set_next_state(turn_id, [REPLY, REPLY])
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.next_state == [REPLY]


async def test_impossible_requests_are_refused(store: Store) -> None:
    turn_id = await recorded(store)
    with pytest.raises(ValueError, match="at least one message"):
        await store.set_next_state(turn_id, [])
    with pytest.raises(ValueError, match="not claimed by workers"):
        await store.claim(READY, owner=OWNER, limit=1, ttl_s=1.0)
    with pytest.raises(ValueError, match="at least one turn"):
        await store.claim(JUDGING, owner=OWNER, limit=0, ttl_s=1.0)
    with pytest.raises(ValueError, match="no hint and no drop reason"):
        await store.commit_verdict(OWNER, a_verdict(turn_id, None), None)
    with pytest.raises(ValueError, match="teacher log-probs"):
        await store.commit_scores(OWNER, [a_score(turn_id, 2)])
