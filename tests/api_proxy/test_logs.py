"""What is logged by default: no key, no header, nothing of what was said, on no path."""

from __future__ import annotations

import logging

import httpx
import pytest

from records.errors import StoreUnavailable
from records.keys import Keys
from records.store import Store
from rollout_bridge.engine.errors import EngineProtocolError, EngineUnavailable
from tests.api_proxy.conftest import WEATHER, Clock, Door

SAID = "zanzibar-{}"
"""What must not be found: each message has its own number."""


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that is logged at the level of `opd proxy`."""
    caplog.set_level(logging.INFO)
    return caplog


def user(number: int) -> dict[str, str]:
    return {"role": "user", "content": SAID.format(number)}


async def a_conversation(door: Door, headers: dict[str, str]) -> None:
    """With a tool, streamed and whole, in three APIs."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "zanzibar-1"}}\n</tool_call>'
    door.will_say(call, "zanzibar-2", "zanzibar-3", "zanzibar-4")
    message, _ = await door.say([user(5)], headers, tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
    history = [user(5), message, {**result, "content": SAID.format(6)}]
    streamed = await door.post(history, headers, tools=[WEATHER], stream=True)
    assert streamed.status_code == 200
    for path, body in (
        ("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": [user(7)]}),
        ("/v1/responses", {"model": "policy", "input": SAID.format(8)}),
    ):
        answered = await door.client.post(path, json=body, headers=headers)
        assert answered.status_code == 200


async def faults(door: Door, headers: dict[str, str]) -> list[httpx.Response]:
    """What clients, the engine and the template do wrong."""
    door.will_say(
        EngineUnavailable("no answer"),
        EngineProtocolError("nonsense"),
        EngineProtocolError("nonsense"),
        door.line("zanzibar-9", fail_at=1),
        "zanzibar-25",
    )
    return [
        await door.post([user(10)], headers),
        await door.post([user(11)], headers),
        await door.post([user(12)], headers, stream=True),
        await door.post([user(13)], headers, tools=SAID.format(14)),
        await door.post([{"role": SAID.format(15), "content": "x"}], headers),
        await door.client.post("/v1/chat/completions", content=b'{"zanzibar-16', headers=headers),
        await door.post([user(17)], {"authorization": "Bearer zanzibar-18"}),
        await door.client.get("/v1/responses/zanzibar-19", headers=headers),
        await door.client.get("/no/route/zanzibar-20", headers=headers),
    ]


async def test_nothing_of_a_conversation_is_logged(
    door: Door,
    store: Store,
    clock: Clock,
    logged: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, key = await Keys(store, clock).create(actor="test")
    clock.now += door.app.state.service.config.key_refresh_s
    headers = {
        "authorization": f"Bearer {key}",
        "x-session-id": SAID.format(21),
        "x-other": SAID.format(22),
    }
    await a_conversation(door, headers)
    responses = await faults(door, headers)
    assert all(response.status_code >= 400 for response in responses[3:])
    await door.app.state.service.recorder.drain()

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(store.writer, "run_bulk", fail)
        door.will_say("zanzibar-23")
        assert (await door.post([user(24)], headers)).status_code == 200
        await door.app.state.service.recorder.drain()

    # All but the client that asks here.
    own = [one for one in logged.records if not one.name.startswith("httpx")]
    assert any("the store does not take" in one.getMessage() for one in own)
    for record in own:
        told = logging.Formatter("%(name)s %(message)s").format(record)
        assert "zanzibar" not in told
        assert key[-43:] not in told
