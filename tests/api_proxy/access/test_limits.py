"""What a key may use: each limit, what is said at it, and that it is nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from records.keys import KeyLimits, Keys
from records.store import Store
from tests.api_proxy.conftest import Clock, Door

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def new_key(door: Door, store: Store, clock: Clock) -> Callable[..., Any]:
    async def make(**limits: int) -> dict[str, str]:
        _, text = await Keys(store, clock).create(actor="test", limits=KeyLimits(**limits))
        clock.now += door.app.state.service.config.key_refresh_s
        return {"authorization": f"Bearer {text}"}

    return make


def refused(response: httpx.Response, limit: str) -> int:
    """Seconds after which the client may come again."""
    assert response.status_code == 429, response.text
    assert limit in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "rate_limit_error"
    wait_s = int(response.headers["retry-after"])
    assert wait_s > 0
    return wait_s


async def test_requests_a_minute(door: Door, clock: Clock, new_key: Callable[..., Any]) -> None:
    limited, other = await new_key(requests_per_minute=2), await new_key()
    door.will_say("1", "2", "3", "4")
    for _ in range(2):
        assert (await door.post(HI, limited)).status_code == 200
    wait_s = refused(await door.post(HI, limited), "requests_per_minute = 2")
    assert (await door.client.get("/v1/models", headers=limited)).status_code == 429
    assert (await door.post(HI, other)).status_code == 200
    clock.now += wait_s
    assert (await door.post(HI, limited)).status_code == 200
    told = door.app.state.service.metrics.exposition().decode()
    assert 'opd_limited_total{limit="requests_per_minute"} 2.0' in told


async def test_tokens_a_minute_are_those_of_prompt_and_reply(
    door: Door, clock: Clock, new_key: Callable[..., Any]
) -> None:
    limited = await new_key(tokens_per_minute=12)
    door.will_say("one two three four five", "6")
    answered = await door.post(HI, limited)
    assert answered.json()["usage"]["total_tokens"] > 12
    wait_s = refused(await door.post(HI, limited), "tokens_per_minute = 12")
    clock.now += wait_s
    assert (await door.post(HI, limited)).status_code == 200


async def test_a_days_quota_outlives_the_proxy(
    door: Door, store: Store, clock: Clock, new_key: Callable[..., Any]
) -> None:
    limited = await new_key(tokens_per_day=12)
    door.will_say("one two three four five", "6")
    answered = await door.post(HI, limited)
    wait_s = refused(await door.post(HI, limited), "tokens_per_day = 12")
    stop = asyncio.Event()
    stop.set()
    places = door.app.state.service.places
    await places.keep_usage(stop)
    [used] = (await Keys(store, clock).usage(int(clock.now // 86_400))).values()
    assert used == answered.json()["usage"]["total_tokens"]
    # Noted once: another note adds nothing.
    await places.keep_usage(stop)
    [again] = (await Keys(store, clock).usage(int(clock.now // 86_400))).values()
    assert again == used
    refused(await door.post(HI, limited), "tokens_per_day = 12")
    clock.now += wait_s
    assert (await door.post(HI, limited)).status_code == 200


async def test_replies_at_once(door: Door, new_key: Callable[..., Any]) -> None:
    limited, other = await new_key(max_concurrent=1), await new_key()
    door.engine.gate = asyncio.Event()
    door.will_say("1", "2", "3")
    first = asyncio.create_task(door.post(HI, limited))
    while not door.engine.prompts:
        await asyncio.sleep(0)
    refused(await door.post(HI, limited), "max_concurrent = 1")
    second = asyncio.create_task(door.post(HI, other))
    door.engine.gate.set()
    assert (await first).status_code == (await second).status_code == 200
    assert (await door.post(HI, limited)).status_code == 200
    several = await door.post(HI, limited, n=2)
    refused(several, "max_concurrent = 1")


async def test_a_refused_request_leaves_its_place(door: Door, new_key: Callable[..., Any]) -> None:
    limited = await new_key(max_concurrent=1)
    door.will_say("1")
    for _ in range(3):
        assert (await door.post(HI, limited, max_tokens=0)).status_code == 400
        too_long = [{"role": "user", "content": "a " * 5000}]
        assert (await door.post(too_long, limited)).status_code == 400
    assert (await door.post(HI, limited)).status_code == 200


@pytest.mark.parametrize("settings", [{"max_running": 1, "max_waiting": 1}])
async def test_a_full_queue_refuses_who_waits_with_most(
    door: Door, new_key: Callable[..., Any]
) -> None:
    greedy, modest = await new_key(), await new_key()
    door.engine.gate = asyncio.Event()
    door.will_say("1", "2", "3")
    first = asyncio.create_task(door.post(HI, greedy))
    while not door.engine.prompts:
        await asyncio.sleep(0)
    second = asyncio.create_task(door.post(HI, greedy))
    while not door.app.state.service.places.num_waiting:
        await asyncio.sleep(0)
    third = await door.post(HI, greedy)
    assert third.status_code == 429
    assert third.json()["error"]["code"] == "queue_full"
    assert int(third.headers["retry-after"]) > 0
    door.engine.gate.set()
    assert (await first).status_code == (await second).status_code == 200
    assert (await door.post(HI, modest)).status_code == 200


@pytest.mark.parametrize("settings", [{"body_timeout_s": 0.05}])
async def test_a_body_that_does_not_come_is_not_waited_for(served: str) -> None:
    host, port = served.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    writer.close()
    await writer.wait_closed()
