"""Who has every turn dropped: what begins, continues and ends a streak, and what a store tells."""

from __future__ import annotations

import pytest

from records.names import DropReason, TurnType
from records.privacy.findings import digest
from records.reading.drop_streaks import ANSWERED, MEANT, SAY_AT, DropStreaks
from records.store import Store
from tests.records.builders import REPLY, SCOPE, a_session, a_turn

DETAIL = f"email in tools[1].function.description {digest('x')}"


@pytest.mark.parametrize("reason", sorted(set(DropReason) - MEANT - ANSWERED))
def test_any_reason_that_drops_every_turn_is_told(reason: DropReason) -> None:
    streaks = DropStreaks()
    for number in range(SAY_AT):
        assert streaks.get("key 1") is None
        streaks.add("key 1", 100.0 + number, reason, None)
    streak = streaks.get("key 1")
    assert streak is not None
    assert streak.words() == (
        f"every turn of key 1 since 1970-01-01T00:01:40+00:00 was dropped: {reason}, {SAY_AT}"
    )


def test_what_grew_long_ago_is_not_told() -> None:
    streaks = DropStreaks()
    for number in range(SAY_AT):
        streaks.add("key 1", 100.0 + number, DropReason.SENSITIVE, DETAIL)
    newest = 100.0 + SAY_AT - 1
    assert [streak.who for streak in streaks.told(after=newest)] == ["key 1"]
    assert streaks.told(after=newest + 1) == []


@pytest.mark.parametrize("reason", sorted(MEANT))
def test_what_is_meant_not_to_train_is_no_streak(reason: DropReason) -> None:
    streaks = DropStreaks()
    for _ in range(2 * SAY_AT):
        streaks.add("key 1", 1.0, reason, None)
    assert streaks.told() == []
    for _ in range(SAY_AT):
        streaks.add("key 1", 2.0, DropReason.LENGTH_CUT, None)
        streaks.add("key 1", 3.0, reason, None)
    assert [streak.number for streak in streaks.told()] == [SAY_AT]


@pytest.mark.parametrize("reason", [None, *sorted(ANSWERED)])
def test_a_turn_that_is_kept_or_judged_ends_a_streak(reason: DropReason | None) -> None:
    streaks = DropStreaks()
    for _ in range(SAY_AT):
        streaks.add("key 1", 1.0, DropReason.SENSITIVE, DETAIL)
    streaks.add("key 1", 2.0, reason, None)
    assert streaks.told() == []


def test_words_name_the_place_and_not_the_digest() -> None:
    streaks = DropStreaks()
    for _ in range(SAY_AT):
        streaks.add("key 1", 1.0, DropReason.SENSITIVE, DETAIL)
    streaks.add("key 1", 1.0, DropReason.LENGTH_CUT, None)
    [streak] = streaks.told()
    assert "sensitive (email in tools[1].function.description), 4, 1 of them" in streak.words()
    assert "sha256" not in streak.words()
    assert streak.digest == digest("x")


def test_memory_does_not_grow_with_history() -> None:
    streaks = DropStreaks()
    for number in range(5000):
        for _ in range(SAY_AT):
            streaks.add(f"session {number}", 1.0, DropReason.SENSITIVE, None)
    assert len(streaks.told()) == 2000
    assert streaks.get("session 4999") is not None


async def test_a_store_tells_a_bounded_number_of_outcomes(store: Store) -> None:
    for _ in range(60):
        session_id = await a_session(store)
        await store.record_turn(a_turn(session_id), scope=SCOPE)
        await store.close_session(session_id, "idle")
    outcomes = await store.recent_outcomes()
    assert len(outcomes) == 50
    assert {one.reason for one in outcomes} == {DropReason.NO_NEXT_STATE}
    assert [one.created_at for one in outcomes] == sorted(one.created_at for one in outcomes)
    long = await a_session(store)
    for _ in range(30):
        turn = a_turn(long, drop_reason=DropReason.LENGTH_CUT)
        await store.record_turn(turn, scope=SCOPE)
    found = [one for one in await store.recent_outcomes() if one.session_id == long]
    assert len(found) == 20


async def test_a_store_leaves_out_turns_whose_outcome_is_open(store: Store) -> None:
    session_id = await a_session(store)
    waiting, judged = a_turn(session_id), a_turn(session_id)
    side = a_turn(session_id, turn_type=TurnType.SIDE, drop_reason=DropReason.SIDE_TURN)
    for turn in (waiting, judged, side):
        await store.record_turn(turn, scope=SCOPE)
    await store.set_next_state(judged.turn_id, [REPLY])
    assert [one.reason for one in await store.recent_outcomes()] == [None]
