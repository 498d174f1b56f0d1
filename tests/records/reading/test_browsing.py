"""Pages of sessions: each session with its own newest turns, however many are read together."""

from __future__ import annotations

from records.names import DropReason, TurnState
from records.reading.browsing import MOST_TURNS, Wanted
from records.store import Store
from tests.records.builders import a_session, recorded

WAITING = TurnState.AWAITING_NEXT_STATE


async def test_each_session_of_a_long_page_has_its_own_turns(store: Store) -> None:
    made = []
    for number in range(60):
        session_id = await a_session(store)
        for _ in range(number % 3):
            await recorded(store, session_id=session_id)
        made.append((session_id, {WAITING: number % 3} if number % 3 else {}))
    page = await store.sessions_page(None, wanted=Wanted(), after=None, limit=100)
    assert [(one.session_id, one.states) for one in page.sessions] == made[::-1]
    assert (page.num_examined, page.next) == (60, None)


async def test_what_is_rare_is_found_and_the_page_ends_there(store: Store) -> None:
    wanted = Wanted(state=TurnState.DROPPED)
    rare = await a_session(store)
    await recorded(store, session_id=rare, drop_reason=DropReason.ABORTED)
    for _ in range(40):
        await recorded(store, session_id=await a_session(store))
    page = await store.sessions_page(None, wanted=wanted, after=None, limit=1)
    [found] = page.sessions
    assert (found.session_id, found.reasons) == (rare, {DropReason.ABORTED: 1})
    assert (page.num_examined, page.next) == (41, None)


async def test_of_a_long_session_the_newest_turns_are_looked_at(store: Store) -> None:
    session_id = await a_session(store)
    oldest = {"session_id": session_id, "drop_reason": DropReason.ABORTED}
    await recorded(store, **oldest)
    for _ in range(MOST_TURNS):
        await recorded(store, session_id=session_id)
    page = await store.sessions_page(None, wanted=Wanted(), after=None, limit=1)
    [found] = page.sessions
    assert (found.states, found.is_cut) == ({WAITING: MOST_TURNS}, True)
    dropped = Wanted(state=TurnState.DROPPED)
    assert not (await store.sessions_page(None, wanted=dropped, after=None, limit=1)).sessions
