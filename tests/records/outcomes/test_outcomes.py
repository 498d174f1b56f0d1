"""Outcomes of sessions on both databases: who may say one, what waits for it, what is left."""

from __future__ import annotations

from typing import Any

import pytest

from records.care.housekeeping import Housekeeping
from records.care.verify import verify_database
from records.config import StoreConfig
from records.errors import StoreConflict
from records.names import DropReason, TurnState
from records.outcomes.rows import OutcomeSource
from records.store import Store
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeRewards
from records.types import CapturedTurn, ReadySample, TurnRecord, VersionSpan
from tests.records.builders import (
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    claimed,
    following,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock

ONLY = OutcomeRewards(kind="only", wait_s=100.0)


async def awaiting(store: Store, *, version: int = 5, **changes: Any) -> str:
    """A ready turn without a hint or a reward, which its session's outcome is to give."""
    spans = (VersionSpan(version=version, start=0, end=3),)
    turn_id = await recorded(store, version_spans=spans, **changes)
    assert await store.set_next_state(turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn_id]
    verdict = a_verdict(turn_id, None, awaits_outcome=True)
    assert await store.commit_verdict(OWNER, verdict, None)
    assert await state_of(store, turn_id) is TurnState.READY
    return turn_id


async def session_of(store: Store, turn_id: str) -> str:
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.session_id


async def lease(
    store: Store, count: int = 1, outcomes: OutcomeRewards = ONLY, **asked: Any
) -> list[ReadySample]:
    await store.drop_without_outcome(outcomes)
    return await store.lease(owner=TRAINER, count=count, ttl_s=60.0, outcomes=outcomes, **asked)


async def test_an_outcome_is_kept_once(store: Store, clock: Clock) -> None:
    turn_id = await awaiting(store)
    session_id = await session_of(store, turn_id)
    kept = await store.add_outcome(SCOPE, 0.25, "half done", session=session_id)
    assert kept is not None
    assert (kept.session_id, kept.value, kept.reason, kept.is_new) == (
        session_id,
        0.25,
        "half done",
        True,
    )
    assert kept.source is OutcomeSource.FEEDBACK
    clock.now += 9
    again = await store.add_outcome(SCOPE, 0.25, "half done", turn_id=turn_id)
    assert again is not None
    assert (again.is_new, again.created_at) == (False, kept.created_at)
    with pytest.raises(StoreConflict, match=r"already has the outcome 0\.25"):
        await store.add_outcome(SCOPE, 1.0, None, session=session_id)
    assert await store.add_outcome("other", 0.25, None, session=session_id) is None
    assert await store.add_outcome(SCOPE, 0.25, None, session="nobody's") is None
    [facts] = await store.sessions_named(session_id)
    assert facts.outcome is not None
    assert (facts.outcome.value, facts.outcome.reason) == (0.25, "half done")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
async def test_other_numbers_are_refused(store: Store, value: float) -> None:
    session_id = await a_session(store)
    with pytest.raises(ValueError, match="a number from 0 to 1"):
        await store.add_outcome(SCOPE, value, None, session=session_id)


async def test_turns_wait_for_it_and_get_it_as_reward(store: Store, config: StoreConfig) -> None:
    turn_id = await awaiting(store)
    assert await lease(store) == []
    await store.add_outcome(SCOPE, 0.75, None, turn_id=turn_id)
    [sample] = await lease(store)
    assert (sample.turn_id, sample.reward, sample.session.outcome) == (turn_id, 0.5, 0.75)
    assert await verify_database(config) == []


async def test_what_nobody_said_in_time_is_no_reward(store: Store, clock: Clock) -> None:
    lost = await awaiting(store)
    hinted = await turn_in(store, TurnState.READY)
    assert await lease(store) == []
    clock.now += 101
    [sample] = await lease(store)
    assert (sample.turn_id, sample.reward) == (hinted, None)
    turn = await store.turn(lost)
    assert turn is not None
    assert (turn.state, turn.drop_reason) == (TurnState.DROPPED, DropReason.NO_OUTCOME)
    # Too late for the batch, not for the turn.
    await store.add_outcome(SCOPE, 1.0, None, turn_id=lost)
    [sample] = await lease(store)
    assert (sample.turn_id, sample.reward) == (lost, 1.0)


async def test_a_run_that_rewards_no_outcomes_any_more_leases_a_turn_with_neither(
    store: Store,
) -> None:
    turn_id = await awaiting(store)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
    assert (sample.turn_id, sample.reward, sample.hint) == (turn_id, None, "")


async def test_a_turn_that_comes_later_is_no_part_of_what_was_said(
    store: Store, clock: Clock
) -> None:
    first = await awaiting(store)
    session_id = await session_of(store, first)
    await store.add_outcome(SCOPE, 1.0, None, session=session_id)
    clock.now += 10
    later = await awaiting(store, session_id=session_id)
    [sample] = await lease(store)
    assert (sample.turn_id, sample.reward) == (first, 1.0)
    assert await lease(store) == []  # nobody can say another one
    turn = await store.turn(later)
    assert turn is not None
    assert turn.drop_reason is DropReason.NO_OUTCOME


async def test_the_last_answer_is_judged_by_what_the_session_came_to(store: Store) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    assert await store.set_next_state(first.turn_id, [REPLY])
    last = following(first)
    await store.record_turn(last, scope=SCOPE)
    await store.add_outcome(SCOPE, 0.0, "The wrong city was booked.", turn_id=first.turn_id)
    turn = await store.turn(last.turn_id)
    assert turn is not None
    assert turn.state is TurnState.JUDGING
    assert turn.next_state == [
        {
            "role": "feedback",
            "content": "Outcome of the whole session: 0 on a scale from 0 to 1\n"
            "The wrong city was booked.",
        }
    ]
    assert turn.feedback_reward is None


async def test_a_session_without_an_answer_waits_for_nobody(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.READY)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=turn_id)
    assert await state_of(store, turn_id) is TurnState.READY


async def test_sessions_that_began_alike_are_compared(store: Store) -> None:
    for version, outcome in ((1, 0.0), (3, 1.0), (4, 0.5)):
        past = await awaiting(store, version=version)
        await store.add_outcome(SCOPE, outcome, None, turn_id=past)
    assert len(await lease(store, 3)) == 3
    mine = await awaiting(store)
    session_id = await session_of(store, mine)
    root = await store.turn(mine)
    assert root is not None
    later = a_turn(
        session_id,
        parent_turn_id=mine,
        messages=[*root.messages, root.response, REPLY],
        prompt_ids=list(range(9)),
        version_spans=root.version_spans,
    )
    await store.record_turn(later, scope=SCOPE)
    assert await store.set_next_state(later.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [later.turn_id]
    verdict = a_verdict(later.turn_id, None, awaits_outcome=True)
    assert await store.commit_verdict(OWNER, verdict, None)
    await store.add_outcome(SCOPE, 1.0, None, session=session_id)
    samples = await lease(store, 2, history=HistoryWindow(versions=2, sessions=True))
    assert {one.turn_id for one in samples} == {mine, later.turn_id}
    for one in samples:
        assert [(past.version, past.outcome) for past in one.session.past] == [(4, 0.5), (3, 1.0)]
        assert one.history.recent == ()
    assert samples[0].session.start == samples[1].session.start


async def test_other_beginnings_and_other_scopes_are_no_comparison(store: Store) -> None:
    other = await awaiting(store, messages=[{"role": "user", "content": "How cold is it?"}])
    await store.add_outcome(SCOPE, 0.0, None, turn_id=other)
    await lease(store)
    mine = await awaiting(store)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=mine)
    [sample] = await lease(store, history=HistoryWindow(versions=9, sessions=True))
    assert sample.session.past == ()


async def test_earlier_sessions_bring_their_answers_for_the_pass_rate(store: Store) -> None:
    past = await awaiting(store, version=4)
    await store.add_outcome(SCOPE, 0.0, None, turn_id=past)
    await lease(store)
    mine = await awaiting(store)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=mine)
    window = HistoryWindow(versions=9, sessions=True, outcomes=True)
    [sample] = await lease(store, history=window)
    assert [one.outcome for one in sample.session.past] == [0.0]
    assert [(one.turn_id, one.reward) for one in sample.history.recent] == [(past, -1.0)]


async def test_a_deleted_session_takes_its_outcome_along(store: Store, clock: Clock) -> None:
    past = await awaiting(store, version=4)
    await store.add_outcome(SCOPE, 0.5, None, turn_id=past)
    await lease(store)
    await store.release_leases(TRAINER)
    session_id = await session_of(store, past)
    gone = await Housekeeping(store, clock).delete([session_id], "forget", patience_s=0.0)
    assert gone.num_sessions == 1
    mine = await awaiting(store)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=mine)
    [sample] = await lease(store, history=HistoryWindow(versions=9, sessions=True))
    assert sample.session.past == ()


async def test_a_verifier_claims_sessions_that_are_over(store: Store, clock: Clock) -> None:
    turn_id = await awaiting(store)
    session_id = await session_of(store, turn_id)

    async def claim(owner: str, idle_s: float = 30.0) -> list[str]:
        found = await store.claim_sessions(owner, limit=5, idle_s=idle_s, ttl_s=60.0)
        return [one.session_id for one in found]

    clock.now += 40
    assert await claim("a") == [], "its last message has no answer yet"
    clock.now += 900
    assert await claim("a") == [session_id]
    assert await claim("b") == []
    assert await store.hold_sessions("a", [session_id], None) == 1
    assert await claim("b") == [session_id]
    clock.now += 61  # b died
    [mine] = await store.claim_sessions("a", limit=5, idle_s=30.0, ttl_s=60.0)
    assert not await store.commit_outcome("b", mine, 1.0, None)
    assert await store.commit_outcome("a", mine, 1.0, "all tests pass")
    assert await claim("b") == []
    [sample] = await lease(store)
    assert sample.reward == 1.0


async def test_a_verifier_that_gives_up_lets_turns_go_on(store: Store, clock: Clock) -> None:
    lost = await awaiting(store)
    session_id = await session_of(store, lost)
    clock.now += 940
    [claim] = await store.claim_sessions("a", limit=5, idle_s=30.0, ttl_s=60.0)
    assert (claim.session_id, claim.last_turn_id) == (session_id, lost)
    assert await store.give_up_outcome("a", session_id, "timeout: no answer in 9 s")
    assert await store.claim_sessions("b", limit=5, idle_s=30.0, ttl_s=60.0) == []
    assert await lease(store) == []
    assert (await store.drops())[DropReason.NO_OUTCOME] == 1
    # A person may still know.
    kept = await store.add_outcome(SCOPE, 0.0, None, session=session_id)
    assert kept is not None
    assert kept.source is OutcomeSource.FEEDBACK
    [sample] = await lease(store)
    assert sample.reward == -1.0


async def test_a_person_is_quicker_than_the_verifier(store: Store, clock: Clock) -> None:
    turn_id = await awaiting(store)
    session_id = await session_of(store, turn_id)
    clock.now += 940
    [claim] = await store.claim_sessions("a", limit=5, idle_s=30.0, ttl_s=60.0)
    await store.add_outcome(SCOPE, 1.0, None, session=session_id)
    assert not await store.commit_outcome("a", claim, 0.0, None)
    [sample] = await lease(store)
    assert sample.reward == 1.0


async def test_a_hint_waits_for_the_outcome_too(store: Store, clock: Clock) -> None:
    turn_id = await recorded(store)
    assert await store.set_next_state(turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, reward=0.5), None)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id, 3)])
    add = OutcomeRewards(kind="add", wait_s=100.0)
    assert await lease(store, outcomes=add) == []
    await store.add_outcome(SCOPE, 0.0, None, turn_id=turn_id)
    [sample] = await lease(store, outcomes=add)
    assert sample.reward == -0.5
    assert sample.hint


async def answered(store: Store) -> str:
    """A session whose last answer nobody has replied to."""
    turn_id = await recorded(store)
    return await session_of(store, turn_id)


async def test_a_session_that_goes_on_while_it_is_verified_is_verified_again(
    store: Store, clock: Clock
) -> None:
    session_id = await answered(store)
    clock.now += 40
    [claim] = await store.claim_sessions("a", limit=5, idle_s=30.0, ttl_s=60.0)
    assert not claim.was_followed
    assert await store.set_next_state(claim.last_turn_id, [REPLY])
    assert not await store.commit_outcome("a", claim, 0.0, None)
    first = await store.turn(claim.last_turn_id)
    assert first is not None
    later = following_turn(first)
    await store.record_turn(later, scope=SCOPE)
    clock.now += 40
    [again] = await store.claim_sessions("b", limit=5, idle_s=30.0, ttl_s=60.0)
    assert (again.session_id, again.last_turn_id) == (session_id, later.turn_id)
    assert await store.commit_outcome("b", again, 1.0, None)
    assert await state_of(store, later.turn_id) is TurnState.JUDGING


def following_turn(first: TurnRecord) -> CapturedTurn:
    return a_turn(
        first.session_id,
        parent_turn_id=first.turn_id,
        messages=[*first.messages, first.response, REPLY],
        prompt_ids=list(range(9)),
    )


async def test_a_verifier_that_was_away_is_asked_about_what_was_dropped_for_want_of_it(
    store: Store, clock: Clock
) -> None:
    lost = await awaiting(store)
    clock.now += 940
    assert await lease(store) == []
    assert (await store.drops())[DropReason.NO_OUTCOME] == 1
    [claim] = await store.claim_sessions("a", limit=5, idle_s=30.0, ttl_s=60.0)
    assert await store.commit_outcome("a", claim, 1.0, None)
    [sample] = await lease(store)
    assert (sample.turn_id, sample.reward) == (lost, 1.0)


async def test_where_no_hint_trains_alone_a_hinted_turn_waits_and_is_dropped_like_others(
    store: Store, clock: Clock
) -> None:
    rewards = OutcomeRewards(kind="only", wait_s=100.0, hints_train=False)
    hinted = await turn_in(store, TurnState.READY)
    assert await lease(store, outcomes=rewards) == []
    clock.now += 101
    assert await lease(store, outcomes=rewards) == []
    turn = await store.turn(hinted)
    assert turn is not None
    assert turn.drop_reason is DropReason.NO_OUTCOME
    await store.add_outcome(SCOPE, 0.0, None, turn_id=hinted)
    [sample] = await lease(store, outcomes=rewards)
    assert (sample.turn_id, sample.reward) == (hinted, -1.0)


async def test_other_turns_of_a_session_wait_too(store: Store) -> None:
    first = await awaiting(store)
    session_id = await session_of(store, first)
    await store.add_outcome(SCOPE, 1.0, None, session=session_id)
    later = await awaiting(store, session_id=session_id)
    samples = await lease(store, whole_sessions=True)
    assert [one.turn_id for one in samples] == [first]
    assert await state_of(store, later) is TurnState.DROPPED


async def test_earlier_answers_count_by_what_their_sessions_came_to(store: Store) -> None:
    for outcome in (0.0, 1.0, None):
        past = await awaiting(store, version=4)
        if outcome is not None:
            await store.add_outcome(SCOPE, outcome, None, turn_id=past)
            assert await lease(store)
    mine = await awaiting(store)
    await store.add_outcome(SCOPE, 1.0, None, turn_id=mine)
    [sample] = await lease(store, history=HistoryWindow(versions=9, outcomes=True))
    assert sorted(one.reward or 0 for one in sample.history.recent) == [-1.0, 1.0]


async def test_waiting_for_outcomes_writes_nothing(store: Store) -> None:
    await awaiting(store)
    await store.drop_without_outcome(ONLY)
    assert await store.ready_count() == 1
    assert await store.ready_count(ONLY) == 0

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a write")

    store.write = fail  # type: ignore[method-assign]
    assert await lease(store) == []
