"""What becomes of feedback in each state of its turn, and of what follows it."""

from __future__ import annotations

import pytest

from records.errors import StoreConflict
from records.feedback.feedback import Feedback, KeptFeedback
from records.feedback.feedback_writes import MAX_PER_TURN, TooMuchFeedback
from records.names import DropReason, FeedbackOutcome, TurnState
from records.store import Store
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    a_score,
    a_verdict,
    claimed,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import feedback_of, verdict_of

AWAITING, JUDGING, REVIEWING, SCORING, READY, LEASED, TRAINED, DROPPED = TurnState
SAID = Feedback(text="It was wrong.")
MESSAGE = {"role": "feedback", "content": "It was wrong."}


async def add(store: Store, turn_id: str, said: Feedback = SAID) -> KeptFeedback:
    kept = await store.add_feedback(SCOPE, turn_id, said)
    assert kept is not None
    return kept


async def next_state_of(store: Store, turn_id: str) -> list[dict]:
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.next_state


@pytest.mark.parametrize(
    ("state", "outcome", "after"),
    [
        (AWAITING, FeedbackOutcome.TO_BE_JUDGED, JUDGING),
        (JUDGING, FeedbackOutcome.JUDGED_AGAIN, JUDGING),  # claimed: somebody is judging it
        (REVIEWING, FeedbackOutcome.JUDGED_AGAIN, JUDGING),
        (SCORING, FeedbackOutcome.JUDGED_AGAIN, JUDGING),
        (READY, FeedbackOutcome.JUDGED_AGAIN, JUDGING),
        (LEASED, FeedbackOutcome.TOO_LATE, LEASED),
        (TRAINED, FeedbackOutcome.TOO_LATE, TRAINED),
        (DROPPED, FeedbackOutcome.NOT_TRAINED, DROPPED),
    ],
)
async def test_what_becomes_of_it(
    store: Store, state: TurnState, outcome: FeedbackOutcome, after: TurnState
) -> None:
    turn_id = await turn_in(store, state)
    kept = await add(store, turn_id)
    assert (kept.outcome, kept.is_new, await state_of(store, turn_id)) == (outcome, True, after)
    reasons = {LEASED: "it is being trained on", TRAINED: "trained in version 1"}
    assert kept.reason == {**reasons, DROPPED: "dropped: aborted"}.get(state)
    assert await feedback_of(store, turn_id) == [
        KeptFeedback(
            feedback_id=kept.feedback_id,
            turn_id=turn_id,
            outcome=outcome,
            reason=kept.reason,
            created_at=kept.created_at,
            is_new=False,
        )
    ]
    followed = [] if state in (AWAITING, DROPPED) else [REPLY]
    assert await next_state_of(store, turn_id) == [*followed, MESSAGE]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (DropReason.NO_HINT, FeedbackOutcome.JUDGED_AGAIN),
        (DropReason.JUDGE_UNAVAILABLE, FeedbackOutcome.JUDGED_AGAIN),
        (DropReason.NO_NEXT_STATE, FeedbackOutcome.TO_BE_JUDGED),
        (DropReason.STALE, FeedbackOutcome.TOO_LATE),
        (DropReason.ROUTED_EXPERTS_MISSING, FeedbackOutcome.TOO_LATE),
        (DropReason.SIDE_TURN, FeedbackOutcome.NOT_TRAINED),
        (DropReason.SENSITIVE, FeedbackOutcome.NOT_TRAINED),
    ],
)
async def test_dropped_turns_come_back_if_the_judge_dropped_them(
    store: Store, reason: DropReason, outcome: FeedbackOutcome
) -> None:
    turn_id = await recorded(store, drop_reason=reason)
    kept = await add(store, turn_id)
    acts = outcome in (FeedbackOutcome.TO_BE_JUDGED, FeedbackOutcome.JUDGED_AGAIN)
    assert kept.outcome is outcome
    assert kept.reason == (None if acts else f"dropped: {reason}")
    assert await state_of(store, turn_id) is (JUDGING if acts else DROPPED)


async def test_the_ordinary_next_state_joins_it(store: Store) -> None:
    turn_id = await recorded(store)
    await add(store, turn_id)
    assert await claimed(store, JUDGING) == [turn_id]
    assert await store.set_next_state(turn_id, [REPLY])
    assert await next_state_of(store, turn_id) == [REPLY, MESSAGE]
    assert not await store.set_next_state(turn_id, [REPLY, REPLY])
    # What was judged is less than there is: the verdict is not taken, and the turn is free again.
    assert not await store.commit_verdict(OWNER, a_verdict(turn_id), None, num_reactions=1)
    assert await claimed(store, JUDGING, owner="other") == [turn_id]
    assert await store.commit_verdict("other", a_verdict(turn_id), None, num_reactions=2)
    assert await state_of(store, turn_id) is SCORING


@pytest.mark.parametrize("state", [SCORING, READY, LEASED, TRAINED])
async def test_a_next_state_after_a_judgement_by_feedback_alone(
    store: Store, state: TurnState
) -> None:
    turn_id = await recorded(store)
    await add(store, turn_id)
    await forward(store, turn_id, state)
    assert await store.set_next_state(turn_id, [REPLY])
    assert await next_state_of(store, turn_id) == [REPLY, MESSAGE]
    assert await state_of(store, turn_id) is (JUDGING if state in (SCORING, READY) else state)


async def forward(store: Store, turn_id: str, state: TurnState) -> None:
    """From judging to `state`."""
    from tests.records.builders import advance

    for step in (JUDGING, SCORING, READY, LEASED):
        if step is state:
            return
        await advance(store, turn_id, step)


async def test_what_was_made_of_less_is_gone(store: Store) -> None:
    turn_id = await turn_in(store, READY)
    await add(store, turn_id)
    assert await verdict_of(store, turn_id) is None
    assert await store.score_of(turn_id) is None
    assert await claimed(store, JUDGING) == [turn_id]
    # A reward alone: nothing teaches under the hint of before.
    verdict = a_verdict(turn_id, None, reward=-1.0)
    assert await store.commit_verdict(OWNER, verdict, None, num_reactions=2)
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
    assert (sample.hint, sample.reward, sample.teachings) == ("", -1.0, ())


async def test_scores_of_the_hint_of_before_are_not_taken(store: Store) -> None:
    turn_id = await turn_in(store, SCORING)
    await add(store, turn_id)
    assert await claimed(store, JUDGING) == [turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, "another hint"), None)
    assert await claimed(store, SCORING) == [turn_id]
    assert not await store.commit_scores(OWNER, [a_score(turn_id)], (HINT,))
    # A control may score under other words than the hint that the turn has.
    assert await store.commit_scores(OWNER, [a_score(turn_id, hint="a control")], ("another hint",))


async def test_the_same_again_changes_nothing(store: Store, clock: Clock) -> None:
    turn_id = await recorded(store)
    named = Feedback(text="Wrong.", external_id="one")
    first = await add(store, turn_id, named)
    clock.now += 60
    for again in (named, Feedback(text="Wrong."), Feedback(text="Wrong.", external_id="two")):
        kept = await add(store, turn_id, again)
        assert not kept.is_new
        assert (kept.feedback_id, kept.outcome) == (first.feedback_id, first.outcome)
        assert kept.created_at == first.created_at
    assert len(await feedback_of(store, turn_id)) == 1
    with pytest.raises(StoreConflict, match="other feedback"):
        await store.add_feedback(SCOPE, turn_id, Feedback(text="Right.", external_id="one"))
    other = await recorded(store)
    with pytest.raises(StoreConflict, match="other feedback"):
        await store.add_feedback(SCOPE, other, named)
    assert (await add(store, other, Feedback(text="Wrong."))).is_new


async def test_a_turn_of_another_scope_is_unknown(store: Store) -> None:
    turn_id = await recorded(store)
    assert await store.add_feedback("another", turn_id, SAID) is None
    assert await store.add_feedback(SCOPE, "unknown", SAID) is None
    assert await state_of(store, turn_id) is AWAITING


async def test_a_turn_takes_so_much_and_no_more(store: Store) -> None:
    turn_id = await recorded(store)
    for number in range(MAX_PER_TURN):
        await add(store, turn_id, Feedback(text=str(number)))
    with pytest.raises(TooMuchFeedback):
        await add(store, turn_id)
    assert not (await add(store, turn_id, Feedback(text="0"))).is_new
    assert len(await next_state_of(store, turn_id)) == MAX_PER_TURN


async def test_scores_are_read_and_become_a_reward(store: Store) -> None:
    turn_id = await recorded(store)
    await add(store, turn_id, Feedback(score=5, score_range=(1, 5), text="Fine."))
    await add(store, turn_id, Feedback(score=-1, score_range=(-1, 1), is_thumb=True))
    await add(store, turn_id, Feedback(correction="21 C"))
    turn = await store.turn(turn_id)
    assert turn is not None
    assert [message["content"] for message in turn.next_state] == [
        "Rating: 5 on a scale from 1 to 5\nFine.",
        "Rating: thumbs down",
        "The corrected answer: 21 C",
    ]
    assert (turn.num_reactions, turn.feedback_reward) == (3, -1.0)
    assert Feedback(score=2, score_range=(0, 8)).reward == -0.5
    assert Feedback(score=1e308, score_range=(0, 1e308)).reward == 1.0
