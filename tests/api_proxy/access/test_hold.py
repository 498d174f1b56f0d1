"""Requests wait while the trainer holds generation, and none is refused for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from records.keys import Keys
from records.names import Consent
from records.store import Store
from rollout_bridge.engine.hold_file import HoldFile, HoldOrder, HoldWriter
from tests.api_proxy.conftest import Clock, Door

HI = [{"role": "user", "content": "Hi."}]


def order(for_s: float = 60.0) -> HoldOrder:
    now = time.time()
    return HoldOrder(version=3, why="a batch is full", since=now, until=now + for_s)


@pytest.fixture
def writer(tmp_path: Path) -> HoldWriter:
    return HoldWriter(tmp_path)


@pytest.fixture
def hold(tmp_path: Path) -> HoldFile:
    return HoldFile(tmp_path)


async def figure(door: Door, name: str) -> float:
    text = (await door.client.get("/metrics")).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.split(" ")[0].split("{")[0] == name
    )


async def until_held(door: Door, number: int) -> None:
    async with asyncio.timeout(20):
        while await figure(door, "opd_held") != number:
            await asyncio.sleep(0.01)


async def test_a_request_waits_for_the_end_of_the_hold(door: Door, writer: HoldWriter) -> None:
    door.will_say("before", "after")
    assert (await door.post(HI)).status_code == 200
    assert await figure(door, "opd_held_requests_total") == 0
    writer.write(order())
    asked = asyncio.create_task(door.post(HI))
    await until_held(door, 1)
    assert len(door.engine.script) == 1, "nothing is sampled"
    writer.remove()
    assert (await asked).status_code == 200
    assert await figure(door, "opd_held") == 0
    assert await figure(door, "opd_held_requests_total") == 1
    assert await figure(door, "opd_held_seconds_count") == 1
    assert 'opd_holds_total{end="ended"} 1.0' in (await door.client.get("/metrics")).text


async def test_what_is_being_answered_goes_on(door: Door, writer: HoldWriter) -> None:
    door.engine.gate = asyncio.Event()
    door.will_say("1")
    running = asyncio.create_task(door.post(HI))
    async with asyncio.timeout(20):
        while not await figure(door, "opd_in_flight"):
            await asyncio.sleep(0.01)
    writer.write(order())
    door.engine.gate.set()
    assert (await running).status_code == 200
    assert await figure(door, "opd_held_requests_total") == 0


@pytest.mark.parametrize("settings", [{"max_running": 1, "max_waiting": 0}])
async def test_none_of_those_who_were_held_is_refused(door: Door, writer: HoldWriter) -> None:
    writer.write(order())
    door.will_say(*"12345678")
    asked = [asyncio.create_task(door.post(HI)) for _ in range(8)]
    await until_held(door, 8)
    writer.remove()
    assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 8


async def test_a_hold_that_is_too_long_ends_by_itself(
    door: Door, writer: HoldWriter, caplog: pytest.LogCaptureFixture
) -> None:
    writer.write(order(for_s=0.2))
    door.will_say("1", "2")
    assert (await door.post(HI)).status_code == 200
    assert 'opd_holds_total{end="max_hold"} 1.0' in (await door.client.get("/metrics")).text
    assert "longer than trainer.max_hold_s" in caplog.text
    assert (await door.post(HI)).status_code == 200, "it is over for those who come later, too"
    writer.remove()


async def test_a_hold_of_a_trainer_that_is_gone_ends(
    door: Door, writer: HoldWriter, tmp_path: Path
) -> None:
    writer.write(order())
    content = (tmp_path / "hold.json").read_bytes()
    door.will_say("1")
    asked = asyncio.create_task(door.post(HI))
    await until_held(door, 1)
    writer.remove()
    (tmp_path / "hold.json").write_bytes(content)  # nobody has it locked
    assert (await asked).status_code == 200


async def test_who_leaves_is_not_waited_for(door: Door, writer: HoldWriter) -> None:
    writer.write(order())
    asked = asyncio.create_task(door.post(HI))
    await until_held(door, 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until_held(door, 0)
    writer.remove()


async def test_who_is_held_when_the_endpoint_stops_is_told_to_come_again(
    door: Door, writer: HoldWriter
) -> None:
    writer.write(order())
    asked = asyncio.create_task(door.post(HI))
    await until_held(door, 1)
    await door.app.state.service.stop()
    refused = await asked
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    writer.remove()


async def test_who_does_not_train_does_not_wait(
    door: Door, writer: HoldWriter, store: Store, clock: Clock
) -> None:
    keys = Keys(store, clock)
    _, secret = await keys.create(name="k", consent=Consent.RECORD, actor="test")
    _, admin = await keys.create(name="admin", is_admin=True, actor="test")
    clock.now += 3  # proxy.key_refresh_s
    writer.write(order())
    door.will_say("1")
    reply = await door.post(HI, headers={"authorization": f"Bearer {secret}"})
    assert reply.status_code == 200
    assert (
        "opd_held_requests_total 0.0"
        in (await door.client.get("/metrics", headers={"authorization": f"Bearer {admin}"})).text
    )
    writer.remove()
