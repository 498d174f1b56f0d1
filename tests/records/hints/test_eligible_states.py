"""Recorded turns at which hints may be rehearsed: of a state only the prompt is read."""

from __future__ import annotations

import numpy as np
import pytest

from records.names import DropReason, TurnState, TurnType
from records.store import Store
from tests.records.builders import SCOPE, a_session, a_turn, turn_in
from tests.records.conftest import Clock
from tests.records.hints.test_memory import examined

NO_STATES = {
    DropReason.SENSITIVE,
    DropReason.RECORD_ONLY,
    DropReason.FORGOTTEN,
    DropReason.AMBIGUOUS_PARENT,
    DropReason.INTERNAL_ERROR,
    DropReason.HELD_OUT,
}


async def test_only_the_prompt_of_a_state_is_read_so_most_dropped_turns_are_some(
    store: Store,
) -> None:
    hint = await examined(store)
    expected = {source.turn_id for source in await store.hint_sources(hint.hint_id)}
    for reason in DropReason:
        turn = a_turn(await a_session(store), drop_reason=reason)
        await store.record_turn(turn, scope=SCOPE)
        expected |= {turn.turn_id} if reason not in NO_STATES else set()
    for sampled in ("temperature", "top_p", "grammar"):
        turn = a_turn(await a_session(store), distribution_modified=sampled)
        await store.record_turn(turn, scope=SCOPE)
        expected.add(turn.turn_id)
    for kind in (TurnType.SIDE, TurnType.TEXT):
        await store.record_turn(a_turn(await a_session(store), turn_type=kind), scope=SCOPE)
    empty = np.array([], dtype=np.int32)
    redacted = a_turn(await a_session(store), prompt_ids=empty, drop_reason=DropReason.LENGTH_CUT)
    await store.record_turn(redacted, scope=SCOPE)
    assert set(await store.states_near(hint.hint_id, rule="near", limit=99)) == expected
    assert set(await store.states_near(hint.hint_id, rule="tools", limit=99)) == expected
    assert set(await store.keep_states(exclude_hints=[], limit=99)) == expected


@pytest.mark.parametrize("state", list(TurnState))
async def test_a_turn_is_a_state_all_its_life(store: Store, state: TurnState) -> None:
    turn_id = await turn_in(store, state)
    assert await store.keep_states(exclude_hints=[], limit=9) == [turn_id]


async def test_a_busy_scope_leaves_places_to_the_others(store: Store, clock: Clock) -> None:
    turns: dict[str, list[str]] = {"busy": [], "quiet": []}
    for number in range(9):
        scope = "quiet" if number in (0, 1) else "busy"
        turn = a_turn(await a_session(store, scope))
        clock.now += 1
        await store.record_turn(turn, scope=scope)
        turns[scope].append(turn.turn_id)
    quiet, busy = turns["quiet"][::-1], turns["busy"][::-1]
    kept = await store.keep_states(exclude_hints=[], limit=5)
    assert kept == [busy[0], quiet[0], busy[1], quiet[1], busy[2]]


async def test_of_very_many_scopes_each_has_its_chance(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("records.hints.reading._KEPT_SCOPES", 2)
    turns: dict[str, str] = {}
    for number in range(5):
        turn = a_turn(await a_session(store, f"scope{number}"))
        await store.record_turn(turn, scope=f"scope{number}")
        turns[turn.turn_id] = f"scope{number}"
    seen: set[str] = set()
    for _ in range(2000):
        kept = await store.keep_states(exclude_hints=[], limit=9)
        assert len({turns[one] for one in kept}) == len(kept) == 2
        seen.update(turns[one] for one in kept)
        # A scope's chance is as large as the gap before its turn's random id: some need many looks.
        if seen == set(turns.values()):
            break
    assert seen == set(turns.values())
