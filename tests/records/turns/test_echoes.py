"""What a client may read again of its request: its own only, and only until it erases it."""

from __future__ import annotations

from records.store import Store
from tests.records.builders import SCOPE, a_turn

ECHO = {"metadata": {"a": "b\x00"}, "created_at": 1}


async def test_an_echo_is_read_by_its_scope_until_it_is_erased(store: Store) -> None:
    session_id = await store.ensure_session(scope=SCOPE, external_id=None)
    turn = a_turn(session_id, request_echo=ECHO)
    await store.record_turn(turn, scope=SCOPE)
    assert await store.request_echo(SCOPE, turn.turn_id) == ECHO
    assert await store.request_echo("other", turn.turn_id) is None
    assert not await store.erase_request_echo("other", turn.turn_id)
    assert await store.erase_request_echo(SCOPE, turn.turn_id)
    assert await store.request_echo(SCOPE, turn.turn_id) is None
    assert not await store.erase_request_echo(SCOPE, turn.turn_id)
    kept = await store.turn(turn.turn_id)
    assert kept is not None
    assert kept.drop_reason is None


async def test_turns_without_an_echo(store: Store) -> None:
    session_id = await store.ensure_session(scope=SCOPE, external_id=None)
    turn = a_turn(session_id)
    await store.record_turn(turn, scope=SCOPE)
    assert await store.request_echo(SCOPE, turn.turn_id) is None
    assert await store.request_echo(SCOPE, "0" * 32) is None
