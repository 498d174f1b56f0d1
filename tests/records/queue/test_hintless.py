"""A turn whose hint cannot be used, or holds no more, keeps its reward."""

from __future__ import annotations

import pytest

from records.care.verify import verify_database
from records.config import StoreConfig
from records.feedback.reviews import HintDecision
from records.hints.types import HintStatus
from records.names import DropReason, TurnState
from records.store import Store
from records.training.outcome_rewards import OutcomeRewards
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    a_result,
    a_score,
    a_verdict,
    a_version,
    claimed,
    recorded,
    state_of,
)

REWARDS = [{"reward": 0.5}, {"awaits_outcome": True}]


async def judged(store: Store, *, review: bool = False, **changes: object) -> str:
    """A turn with a hint, in scoring, or with a person."""
    turn_id = await recorded(store)
    assert await store.set_next_state(turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn_id]
    verdict = a_verdict(turn_id, **changes)
    assert await store.commit_verdict(OWNER, verdict, None, review=review)
    return turn_id


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("reason", [DropReason.HINT_AGREES, DropReason.TEACHER_UNAVAILABLE])
async def test_a_turn_goes_on_without_a_hint_that_cannot_be_used(
    store: Store, config: StoreConfig, reward: dict[str, object], reason: DropReason
) -> None:
    turn_id = await judged(store, **reward)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.let_go_of("another", turn_id, reason) is None
    assert await store.let_go_of(OWNER, turn_id, reason) is TurnState.READY
    outcomes = None
    if "awaits_outcome" in reward:
        await store.add_outcome(SCOPE, 0.75, None, turn_id=turn_id)
        outcomes = OutcomeRewards(kind="only", wait_s=9.0)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0, outcomes=outcomes)
    assert (sample.turn_id, sample.reward, sample.hint, sample.teachings) == (turn_id, 0.5, "", ())
    hints = [one.text for one in await store.hints(scope=SCOPE) if one.num_confirmed]
    assert hints == ([] if reason is DropReason.HINT_AGREES else [HINT])
    assert await verify_database(config) == []


async def test_without_a_reward_it_is_dropped_and_a_fault_of_the_turn_drops_it_anyway(
    store: Store,
) -> None:
    plain = await judged(store)
    assert await claimed(store, TurnState.SCORING) == [plain]
    state = await store.let_go_of(OWNER, plain, DropReason.HINT_AGREES)
    assert state is TurnState.DROPPED
    odd = await judged(store, reward=1.0)
    assert await claimed(store, TurnState.SCORING) == [odd]
    assert await store.let_go_of(OWNER, odd, DropReason.INTERNAL_ERROR) is TurnState.DROPPED


async def test_a_hint_that_a_person_rejects_costs_no_reward(store: Store) -> None:
    rewarded = await judged(store, review=True, reward=-1.0)
    plain = await judged(store, review=True)
    for turn_id, state in ((rewarded, TurnState.READY), (plain, TurnState.DROPPED)):
        [waiting] = [one for one in await store.proposals(scope=SCOPE) if one.turn_id == turn_id]
        decided = HintDecision(
            turn_id=turn_id,
            judged_at=waiting.judged_at,
            hint=None,
            is_approved=False,
            author="somebody",
        )
        assert await store.review(decided, SCOPE) is not None
        assert await state_of(store, turn_id) is state


async def test_a_hint_that_ends_costs_no_reward(store: Store) -> None:
    turn_id = await judged(store, reward=1.0)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id)])
    [hint] = await store.hints(scope=SCOPE)
    assert await store.delete_hint(hint.hint_id, SCOPE) is not None
    ended = await store.hint(hint.hint_id)
    assert ended is not None
    assert ended.status is HintStatus.DELETED
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
    assert (sample.turn_id, sample.reward, sample.hint) == (turn_id, 1.0, "")


async def test_what_a_lost_step_trained_by_its_outcome_is_trained_again(store: Store) -> None:
    turn_id = await recorded(store)
    assert await store.set_next_state(turn_id, [REPLY])
    await claimed(store, TurnState.JUDGING)
    verdict = a_verdict(turn_id, None, awaits_outcome=True)
    assert await store.commit_verdict(OWNER, verdict, None)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=turn_id)
    outcomes = OutcomeRewards(kind="only", wait_s=9.0)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60.0, outcomes=outcomes)
    await store.commit_step(version=a_version(1), results=[a_result(turn_id, 3)])
    await store.reconcile([], [])
    assert await state_of(store, turn_id) is TurnState.READY
