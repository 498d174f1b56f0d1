"""What people decide on hints, and what becomes of them and their turns, on both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from records.care.deletion import delete_sessions_op
from records.errors import StoreConflict
from records.feedback.feedback import Feedback
from records.feedback.reviews import HintDecision, Proposal
from records.names import DropReason, ReviewDecision, TurnState
from records.store import Store
from records.types import Verdict
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_session,
    a_turn,
    a_verdict,
    claimed,
    state_of,
    turn_in,
)
from tests.records.looking import verdict_of

REVIEWING = TurnState.REVIEWING


async def proposed(store: Store, scope: str = SCOPE) -> Proposal:
    """The hint of a new turn, which waits for a person."""
    turn = a_turn(await a_session(store, scope))
    await store.record_turn(turn, scope=scope)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id), None, review=True)
    [found] = [one for one in await store.proposals() if one.turn_id == turn.turn_id]
    return found


def answer_to(one: Proposal, *, is_approved: bool = True, hint: str | None = None) -> HintDecision:
    return HintDecision(
        turn_id=one.turn_id,
        judged_at=one.judged_at,
        is_approved=is_approved,
        hint=hint,
        author="Ada",
    )


async def test_nothing_is_learned_of_a_hint_that_waits(store: Store) -> None:
    waiting = await proposed(store)
    assert (waiting.hint, waiting.num_votes, waiting.num_positive) == (HINT, 3, 3)
    assert waiting.words == "I wanted Celsius."
    assert await state_of(store, waiting.turn_id) is REVIEWING
    assert await store.hints() == []
    assert await claimed(store, TurnState.SCORING) == []


async def test_an_approved_hint_enters_the_memory_and_its_turn_goes_on(store: Store) -> None:
    waiting = await proposed(store)
    review = await store.review(answer_to(waiting))
    assert review is not None
    assert (review.decision, review.hint) == (ReviewDecision.APPROVED, HINT)
    [hint] = await store.hints()
    assert hint.text == HINT
    [source] = await store.hint_sources(hint.hint_id)
    assert (source.turn_id, source.num_positive) == (waiting.turn_id, 3)
    assert await claimed(store, TurnState.SCORING) == [waiting.turn_id]
    assert await store.proposals() == []
    assert await store.review_of(waiting.turn_id) == review


async def test_only_the_hint_that_was_seen_is_approved(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    verdict = replace(a_verdict(turn_id), candidates=(HINT, "Nobody saw this one."))
    assert await store.commit_verdict(OWNER, verdict, None, review=True)
    [waiting] = await store.proposals()
    assert await store.review(answer_to(waiting)) is not None
    found = await verdict_of(store, turn_id)
    assert found is not None
    assert found.candidates == (HINT,)


async def test_an_edited_hint_takes_the_place_of_the_judges(store: Store) -> None:
    waiting = await proposed(store)
    review = await store.review(answer_to(waiting, hint="Always use Celsius."))
    assert review is not None
    assert (review.decision, review.proposed) == (ReviewDecision.EDITED, HINT)
    assert [one.text for one in await store.hints()] == ["Always use Celsius."]
    verdict = await verdict_of(store, waiting.turn_id)
    assert verdict is not None
    assert verdict.candidates == ("Always use Celsius.",)
    [turn] = await store.claim(TurnState.SCORING, owner=OWNER, limit=1, ttl_s=60)
    assert turn.hint == "Always use Celsius."


async def test_a_rejected_hint_leaves_nothing_but_the_decision(store: Store) -> None:
    waiting = await proposed(store)
    review = await store.review(answer_to(waiting, is_approved=False, hint="not kept"))
    assert review is not None
    assert (review.decision, review.hint) == (ReviewDecision.REJECTED, None)
    assert await store.hints() == []
    assert await store.drops() == {DropReason.REVIEW_REJECTED: 1}
    expected = dict.fromkeys(ReviewDecision, 0) | {ReviewDecision.REJECTED: 1}
    assert await store.review_decisions() == expected
    assert await store.review_decisions("another") == dict.fromkeys(ReviewDecision, 0)


async def test_each_hint_is_decided_once_and_as_it_was_seen(store: Store) -> None:
    waiting = await proposed(store)
    assert await store.review(answer_to(waiting), scope="another") is None
    assert await store.review(replace(answer_to(waiting), turn_id="unknown")) is None
    with pytest.raises(StoreConflict, match="judged again"):
        await store.review(replace(answer_to(waiting), judged_at=waiting.judged_at - 1))
    assert await store.review(answer_to(waiting), scope=SCOPE) is not None
    with pytest.raises(StoreConflict, match="it is scoring"):
        await store.review(answer_to(waiting, is_approved=False))


async def test_feedback_on_a_hint_that_waits_brings_it_back_to_the_judge(store: Store) -> None:
    waiting = await proposed(store)
    await store.add_feedback(SCOPE, waiting.turn_id, Feedback(text="Celsius, always."))
    assert await store.proposals() == []
    with pytest.raises(StoreConflict, match="it is judging"):
        await store.review(answer_to(waiting))


async def test_a_rejected_turn_is_judged_again_when_more_is_said(store: Store) -> None:
    waiting = await proposed(store)
    await store.review(answer_to(waiting, is_approved=False))
    await store.add_feedback(SCOPE, waiting.turn_id, Feedback(text="Celsius, always."))
    assert await state_of(store, waiting.turn_id) is TurnState.JUDGING
    assert await store.review_of(waiting.turn_id) is None


async def test_a_turn_without_a_hint_is_not_reviewed(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    verdict: Verdict = a_verdict(turn_id, None)
    assert await store.commit_verdict(OWNER, verdict, DropReason.NO_HINT, review=True)
    assert await state_of(store, turn_id) is TurnState.DROPPED


async def test_hints_wait_newest_first_and_page_by_page(store: Store) -> None:
    turn_ids = [(await proposed(store)).turn_id for _ in range(3)]
    elsewhere = (await proposed(store, "another")).turn_id
    first = await store.proposals(scope=SCOPE, limit=2)
    assert [one.turn_id for one in first] == turn_ids[:0:-1]
    rest = await store.proposals(scope=SCOPE, limit=2, after=first[-1].turn_id)
    assert [one.turn_id for one in rest] == turn_ids[:1]
    assert [one.turn_id for one in await store.proposals(scope="another")] == [elsewhere]
    assert await store.proposals(after="unknown") == []


async def test_what_was_decided_goes_with_its_session(store: Store) -> None:
    waiting = await proposed(store)
    await store.review(answer_to(waiting))
    await store.write(
        delete_sessions_op, session_ids=[waiting.session_id], reason="forget", now=1.0
    )
    assert await store.review_of(waiting.turn_id) is None
    assert await store.hints() == []


async def test_a_deleted_hint_leaves_no_text_with_its_decision(store: Store) -> None:
    waiting = await proposed(store)
    await store.review(answer_to(waiting, hint="Always use Celsius."))
    [hint] = await store.hints()
    assert await store.delete_hint(hint.hint_id) is not None
    review = await store.review_of(waiting.turn_id)
    assert review is not None
    assert (review.decision, review.proposed, review.hint) == (ReviewDecision.EDITED, "", "")
