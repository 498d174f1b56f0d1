"""What a proxy that is told to stop says, finishes, and cuts off."""

from __future__ import annotations

import asyncio

import openai
import pytest

from records.names import DropReason
from tests.api_proxy.conftest import Door
from tests.records.looking import list_turns

HI = [{"role": "user", "content": "hi"}]


async def begun(door: Door) -> None:
    """The engine was asked."""
    while not door.engine.prompts:
        await asyncio.sleep(0)


async def sampled(door: Door, number: int) -> None:
    """So many tokens came from the engine."""
    in_flight = door.app.state.service.in_flight
    while sum(len(turn.rollout.ids) for turn in in_flight.values()) < number:
        await asyncio.sleep(0)


async def test_replies_end_and_no_more_are_begun(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.engine.gate = asyncio.Event()
    door.will_say("All of it.", "Never.")
    stream = asyncio.create_task(
        agent.chat.completions.create(model="policy", messages=HI, stream=True)
    )
    await begun(door)
    stopping = asyncio.create_task(door.app.state.service.stop())
    await asyncio.sleep(0)
    ready = await door.client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "shutting_down")
    assert (await door.client.get("/healthz")).status_code == 200
    for path, body in (
        ("/v1/chat/completions", {"model": "policy", "messages": HI}),
        ("/v1/responses", {"model": "policy", "input": "hi"}),
    ):
        refused = await door.client.post(path, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
    anthropics = await door.client.post(
        "/v1/messages", json={"model": "policy", "max_tokens": 9, "messages": HI}
    )
    assert anthropics.json()["error"]["type"] == "overloaded_error"
    door.engine.gate.set()
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in await stream])
    assert text == "All of it."
    await stopping
    [ref] = await list_turns(door.store)
    assert ref.drop_reason is None


@pytest.mark.parametrize("settings", [{"shutdown_grace_s": 0.0}])
@pytest.mark.parametrize("hears_aborts", [True, False])
async def test_what_does_not_end_is_cut_off_and_recorded(
    door: Door, agent: openai.AsyncOpenAI, hears_aborts: bool
) -> None:
    door.engine.hears_aborts = hears_aborts
    door.will_say(door.line("one two three four", hang_at=2))
    stream = await agent.chat.completions.create(model="policy", messages=HI, stream=True)
    await sampled(door, 2)
    await door.app.state.service.stop()
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await door.app.state.service.recorder.drain()
    [ref] = await list_turns(door.store)
    assert ref.drop_reason is DropReason.SHUTDOWN
    assert len((await door.turn(ref.turn_id)).response_ids) == 2


async def test_a_second_signal_ends_the_wait(door: Door) -> None:
    door.will_say(door.line("one two three four", hang_at=1))
    asked = asyncio.create_task(door.post(HI))
    await begun(door)
    stopping = asyncio.create_task(door.app.state.service.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    door.app.state.service.replies.hurry()
    await stopping
    assert (await asked).json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("settings", [{"shutdown_grace_s": 0.0}])
async def test_an_unstreamed_reply_that_is_cut_off_may_be_asked_for_again(door: Door) -> None:
    door.will_say(door.line("one two three four", hang_at=0))
    asked = asyncio.create_task(door.post(HI))
    await begun(door)
    await door.app.state.service.stop()
    refused = await asked
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("settings", [{"max_running": 1}])
async def test_who_still_waits_is_told_to_come_again(door: Door) -> None:
    door.engine.gate = asyncio.Event()
    door.will_say("1")
    first = asyncio.create_task(door.post(HI))
    await begun(door)
    second = asyncio.create_task(door.post(HI))
    while not door.app.state.service.places.num_waiting:
        await asyncio.sleep(0)
    stopping = asyncio.create_task(door.app.state.service.stop())
    assert (await second).status_code == 503
    door.engine.gate.set()
    assert (await first).status_code == 200
    await stopping
