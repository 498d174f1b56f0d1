"""Neither the database nor the spill file takes a turn: the request fails, so what is answered is
kept. The disk is a small one, and it is full; or the database refuses the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from records.care.housekeeping import Housekeeping
from records.config import StoreConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import Door
from tests.api_proxy.recording.test_spool import a_process, metric, small_disk

__all__ = ["small_disk"]

LONG = "It is 21 C. " * 500
USER = {"role": "user", "content": "How warm is it?"}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "How warm is it?", "max_tokens": 10_000},
    "/v1/responses": {"input": "How warm is it?"},
    "/v1/messages": {"messages": [USER], "max_tokens": 10_000},
}
LAST_WORDS = ("[DONE]", "response.completed", "message_stop", '"finish_reason":"stop"')
"""What only the end of a stream says."""


@dataclass
class FullDisk:
    door: Door
    ballast: Path


@pytest.fixture
async def full(
    small_disk: Path,
    rendering: Rendering,
    clock: Callable[[], float],
) -> AsyncIterator[FullDisk]:
    """A proxy whose disk is full, with no room reserved for the spill file."""
    config = StoreConfig.sqlite(small_disk / "records.db", spill_reserve_bytes=0)
    async with a_process(config, rendering, clock) as door:
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield FullDisk(door, ballast)
        ballast.unlink(missing_ok=True)


async def lost(door: Door, number: int) -> bool:
    return await metric(door, f"opd_store_failed_turns_total {number}.0")


@pytest.mark.parametrize("path", DOORS)
async def test_a_stream_ends_with_an_error_and_without_its_last_chunk(
    full: FullDisk, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    full.door.will_say(LONG)
    body = {"model": "policy", "stream": True, **DOORS[path]}
    streamed = await full.door.client.post(path, json=body)
    assert streamed.status_code == 200
    assert len(streamed.text) > 10_000  # it broke off at its end, not before its beginning
    assert "was not recorded" in streamed.text
    assert not any(word in streamed.text for word in LAST_WORDS)
    assert await lost(full.door, 1)
    assert "is lost because it was not spilled" in caplog.text
    assert sum((await full.door.store.counts()).values()) == 0


@pytest.mark.parametrize("path", DOORS)
async def test_a_whole_reply_becomes_a_503(full: FullDisk, path: str) -> None:
    full.door.will_say(LONG)
    refused = await full.door.client.post(path, json={"model": "policy", **DOORS[path]})
    assert refused.status_code == (529 if path == "/v1/messages" else 503)
    assert "was not recorded" in refused.json()["error"]["message"]
    assert "It is 21 C." not in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert await lost(full.door, 1)


async def test_one_of_several_answers_that_is_lost_fails_the_request(full: FullDisk) -> None:
    full.door.will_say(LONG, LONG)
    refused = await full.door.post([USER], n=2)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "turn_not_kept"


async def test_with_room_again_requests_are_answered_and_kept(full: FullDisk) -> None:
    full.door.will_say(LONG, LONG)
    assert (await full.door.post([USER])).status_code == 503
    full.ballast.unlink()
    async with asyncio.timeout(30):
        answered = await full.door.post([USER])
        assert answered.status_code == 200
        while full.door.app.state.service.spool.is_waiting:
            await asyncio.sleep(0.02)
    assert sum((await full.door.store.counts()).values()) == 1
    assert await lost(full.door, 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", DOORS)
async def test_a_turn_that_the_database_refuses_fails_the_request_once(
    door: Door, clock: Callable[[], float], path: str, stream: bool
) -> None:
    """Its session is deleted while it is answered; sent again it begins a new one."""
    door.engine.gate = asyncio.Event()
    door.will_say(LONG, LONG)
    body = {"model": "policy", "stream": stream, **DOORS[path]}
    asked = asyncio.create_task(door.client.post(path, json=body))
    while not door.engine.prompts:
        await asyncio.sleep(0.01)
    [turn] = door.app.state.service.in_flight.values()
    await asyncio.wait({turn.notes})
    await Housekeeping(door.store, clock).delete([turn.session_id], "forget", patience_s=0.0)
    door.engine.gate.set()
    refused = await asked
    assert "was not recorded" in refused.text
    assert not any(word in refused.text for word in LAST_WORDS)
    assert stream or refused.status_code >= 500
    assert await lost(door, 1)
    again = await door.client.post(path, json=body)
    assert again.status_code == 200
    assert "was not recorded" not in again.text
    assert sum((await door.store.counts()).values()) == 1
