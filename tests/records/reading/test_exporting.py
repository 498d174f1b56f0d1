from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from records.care.deletion import delete_sessions_op
from records.care.housekeeping import Housekeeping
from records.feedback.feedback import Feedback, corrected_answer
from records.names import DropReason, TurnState
from records.reading.exporting import (
    SessionHeader,
    TurnPlace,
    Wanted,
    num_sessions,
    parents_first,
    places,
    read_sessions,
)
from records.reading.whole_turns import WholeTurn, whole_turns
from records.store import Store
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_session,
    a_turn,
    following,
    recorded,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import verdict_of


async def read(
    store: Store, wanted: Wanted, each: Callable[[Connection, SessionHeader], Any]
) -> list[Any]:
    found: list[Any] = []
    async for _ in read_sessions(store, wanted, lambda c, one: found.append(each(c, one))):
        pass
    return found


async def names(store: Store, **wanted: Any) -> list[str]:
    return await read(store, Wanted(**wanted), lambda _, session: session.session_id)


async def test_sessions_come_once_each_in_the_order_of_their_beginning(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("records.reading.exporting._SESSIONS_PER_PAGE", 2)
    session_ids = [await a_session(store) for _ in range(5)]
    assert await names(store) == session_ids
    assert await num_sessions(store, Wanted()) == 5


async def test_sessions_are_chosen_by_name_and_by_when_they_were_seen(
    store: Store, clock: Clock
) -> None:
    first = await store.ensure_session(scope=SCOPE, external_id="mine")
    clock.now += 100.0
    second = await a_session(store)
    assert await names(store, session="mine") == await names(store, session=first) == [first]
    assert await names(store, since=clock.now - 50.0) == [second]
    assert await num_sessions(store, Wanted(session="mine")) == 1
    assert await names(store, session="mine", since=clock.now) == []


async def test_turns_stand_in_the_order_of_recording_with_their_parents(store: Store) -> None:
    first = a_turn(await a_session(store))
    second = following(first)
    other = a_turn(first.session_id, messages=[{"role": "user", "content": "Another."}])
    elsewhere = following(first, session_id=await a_session(store))
    for turn in (first, second, other, elsewhere):
        await store.record_turn(turn, scope=SCOPE)
    inside, outside = await read(store, Wanted(), lambda c, one: places(c, one.session_id))
    waiting = TurnState.AWAITING_NEXT_STATE
    assert inside == [
        TurnPlace(turn_id=turn.turn_id, parent_id=parent, position=position, state=waiting)
        for position, (turn, parent) in enumerate(
            [(first, None), (second, first.turn_id), (other, None)]
        )
    ]
    assert [(place.turn_id, place.parent_id) for place in outside] == [(elsewhere.turn_id, None)]


async def test_what_is_forgotten_is_not_there(store: Store, clock: Clock) -> None:
    kept, gone = await a_session(store), await a_session(store)
    for session_id in (kept, gone):
        await recorded(store, session_id=session_id)
    await recorded(store, session_id=kept, drop_reason=DropReason.FORGOTTEN)
    await Housekeeping(store, clock).delete([gone], "forget", patience_s=0.0)
    [turns] = await read(store, Wanted(), lambda c, one: places(c, one.session_id))
    assert len(turns) == 1


async def test_a_session_is_read_as_it_was_when_its_reading_began(
    store: Store, clock: Clock
) -> None:
    """Another connection deletes the session between two reads of it."""
    turn_id = await turn_in(store, TurnState.TRAINED)
    session_id = (await store.turns([turn_id]))[0].session_id

    def each(connection: Connection, session: SessionHeader) -> list[WholeTurn]:
        before = places(connection, session.session_id)
        delete_elsewhere(store, session_id, clock.now)
        return whole_turns(connection, [place.turn_id for place in before])

    [[whole]] = await read(store, Wanted(), each)
    assert whole.turn.turn_id == turn_id
    assert whole.turn.prompt_ids.tolist() == [1, 2, 3, 4]
    assert await names(store) == []


def delete_elsewhere(store: Store, session_id: str, now: float) -> None:
    """Delete in a thread with connections of its own, and wait for it."""

    async def delete() -> None:
        async with await Store.open(store.config) as other:
            # Without what cleans up after it: that waits for the reader.
            await other.writer.run(
                lambda c: delete_sessions_op(c, session_ids=[session_id], reason="forget", now=now)
            )

    thread = Thread(target=lambda: asyncio.run(delete()))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


async def test_a_whole_turn_has_all_that_was_made_of_it(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.TRAINED)
    said = Feedback(text="Celsius!", correction="21 C.", score=1.0, score_range=(1.0, 5.0))
    await store.add_feedback(SCOPE, turn_id, said)
    bare = await recorded(store)
    whole, other = (
        one
        for turns in await read(
            store,
            Wanted(),
            lambda c, s: whole_turns(c, [p.turn_id for p in places(c, s.session_id)]),
        )
        for one in turns
    )
    assert whole.turn.turn_id == turn_id
    assert whole.verdict == await verdict_of(store, turn_id)
    assert whole.verdict is not None
    assert whole.verdict.hint == HINT
    assert whole.score is not None
    assert whole.trained_version == 1
    assert [sample.version for sample in whole.samples] == [1]
    assert whole.samples[0].advantages.tolist() == [-0.5, 0.0, 0.5]
    assert whole.num_followed == 1
    assert whole.turn.next_state[:1] == [REPLY]
    [given_one] = whole.feedback
    assert given_one.reward == -1.0
    assert corrected_answer(given_one.message) == "21 C."
    assert other.turn.turn_id == bare
    assert (other.verdict, other.score, other.trained_version) == (None, None, None)
    assert (other.feedback, other.samples, other.num_followed) == ((), (), 0)


async def test_turns_that_are_not_there_are_left_out(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    await store.release(OWNER, [turn_id])
    [found] = await read(store, Wanted(), lambda c, _: whole_turns(c, ["none", turn_id]))
    assert [whole.turn.turn_id for whole in found] == [turn_id]


@given(
    st.lists(st.integers(0, 6), unique=True, max_size=7).flatmap(
        lambda ids: st.tuples(st.just(ids), st.lists(st.integers(0, 9), min_size=len(ids)))
    )
)
def test_parents_stand_before_children_and_nothing_is_lost(
    drawn: tuple[list[int], list[int]],
) -> None:
    ids, above = drawn
    # A smaller number is an earlier turn, so there are no circles, in whatever order they lie.
    turns = [
        (str(one), str(parent) if parent < one else None)
        for one, parent in zip(ids, above, strict=False)
    ]
    placed = parents_first(turns)
    assert sorted(name for name, _ in placed) == sorted(name for name, _ in turns)
    known = {name for name, _ in turns}
    seen: set[str] = set()
    for name, parent in placed:
        wanted = dict(turns)[name]
        assert parent == (wanted if wanted in known else None)
        assert parent is None or parent in seen
        seen.add(name)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (Feedback(correction="21 C.\nOr 22."), "21 C.\nOr 22."),
        (Feedback(text="No.", correction="21 C."), "21 C."),
        (Feedback(text="No.", is_thumb=True, score=-1.0, score_range=(-1.0, 1.0)), None),
    ],
)
def test_a_corrected_answer_is_found_in_its_message(said: Feedback, answer: str | None) -> None:
    assert corrected_answer(said.message()) == answer


def test_two_corrected_answers_in_one_message_are_none() -> None:
    said = Feedback(text="The corrected answer: 20 C.", correction="21 C.")
    with pytest.raises(ValueError, match="two corrected answers"):
        corrected_answer(said.message())
