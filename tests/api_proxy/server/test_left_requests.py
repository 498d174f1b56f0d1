"""A first request that got no answer and is sent again goes on in its session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from records.names import DropReason
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import Door
from tests.records.looking import list_turns

USER = {"role": "user", "content": "Book a hotel."}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 99},
}


async def leave(door: Door, base_url: str, path: str, body: dict[str, Any]) -> None:
    """Send a request and close the connection while the engine samples."""
    before = len(door.engine.prompts)
    async with httpx.AsyncClient(base_url=base_url) as client:
        asked = asyncio.create_task(client.post(path, json=body))
        while len(door.engine.prompts) == before:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    async with asyncio.timeout(20):
        while door.app.state.service.in_flight:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("hang_at", [0, 1])
@pytest.mark.parametrize("path", DOORS)
async def test_a_first_request_that_was_left_and_is_repeated_is_one_session(
    door: Door, served: str, path: str, hang_at: int
) -> None:
    body = {"model": "policy", **DOORS[path]}
    door.will_say(door.line("Which city?", hang_at=hang_at), "Which city?", "Which city?")
    await leave(door, served, path, body)
    again = await door.client.post(path, json=body)
    turn = await door.turn(again.headers["x-turn-id"])
    (session,) = {ref.session_id for ref in await list_turns(door.store)}
    assert turn.session_id == session
    if hang_at:
        left = [ref for ref in await list_turns(door.store) if ref.turn_id != turn.turn_id]
        assert [ref.drop_reason for ref in left] == [DropReason.CLIENT_DISCONNECTED]
    # Whoever begins in the same words after that is somebody else.
    other = await door.client.post(path, json=body)
    assert (await door.turn(other.headers["x-turn-id"])).session_id != session


async def test_so_is_one_that_failed(door: Door) -> None:
    door.will_say(EngineUnavailable("gone"), "Which city?")
    failed = await door.post([USER])
    assert failed.status_code == 503
    message, turn = await door.say([USER])
    door.will_say("Booked.")
    _, after = await door.say([USER, message, {"role": "user", "content": "Karo."}])
    assert after.session_id == turn.session_id
    sessions = await door.store.sessions_named(turn.session_id)
    assert [len(session.turns) for session in sessions] == [2]


@pytest.mark.parametrize(
    "change",
    [
        lambda door: door.post([{"role": "user", "content": "Something else."}]),
        lambda door: door.post([USER], {"authorization": "Bearer another"}),
        lambda door: door.post([USER], {"x-session-id": "named"}),
    ],
)
async def test_another_request_does_not_take_its_session(
    door: Door, change: Callable[[Door], Awaitable[httpx.Response]]
) -> None:
    door.will_say(EngineUnavailable("gone"), "One.", "Two.")
    await door.post([USER])
    other = await door.turn((await change(door)).headers["x-turn-id"])
    _, again = await door.say([USER])
    assert again.session_id != other.session_id
