"""The Responses door over a real store: same tree, same tokens, state that outlives the proxy."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from api_proxy.app import ProxyDeps, create_app
from api_proxy.config import ProxyConfig
from records.errors import StoreUnavailable
from records.types import TurnRecord
from rollout_bridge.engine.errors import EngineUnavailable
from tests.api_proxy.conftest import WEATHER, Door

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", **WEATHER["function"], "strict": False}


async def post(door: Door, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": "policy", "input": "hi", **fields}
    return await door.client.post("/v1/responses", json=body, headers=headers)


async def say(door: Door, **fields: Any) -> tuple[dict[str, Any], TurnRecord]:
    response = await post(door, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    return body, await door.turn(body["id"].removeprefix("resp_"))


def output(item: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item["call_id"], "output": text}


def assert_extends(later: TurnRecord, earlier: TurnRecord) -> None:
    sampled = np.concatenate([earlier.prompt_ids, earlier.response_ids])
    assert later.prompt_ids[: len(sampled)].tolist() == sampled.tolist()
    assert later.parent_turn_id == earlier.turn_id
    assert later.session_id == earlier.session_id


async def test_a_tool_conversation_by_items(door: Door) -> None:
    door.will_say("<think>\nhm\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL, "Sunny.")
    reply, first = await say(door, tools=[TOOL], instructions="Help.")
    assert [item["type"] for item in reply["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert reply["tools"] == [TOOL]
    assert reply["instructions"] == "Help."
    calls = reply["output"][2:]
    history = [{"role": "user", "content": "hi"}, *reply["output"]]
    history += [output(item, "sun") for item in calls]
    after, second = await say(door, tools=[TOOL], instructions="Help.", input=history)
    assert_extends(second, first)
    assert [message["role"] for message in (await door.turn(first.turn_id)).next_state] == [
        "tool",
        "tool",
    ]
    assert after["output"][0]["content"][0]["text"] == "Sunny."
    assert after["usage"]["input_tokens"] == len(second.prompt_ids)


async def test_a_tool_conversation_by_previous_response(door: Door) -> None:
    door.will_say(CALL, "Sunny.")
    reply, first = await say(door, tools=[TOOL], instructions="Help.")
    fields = {"tools": [TOOL], "instructions": "Help.", "previous_response_id": reply["id"]}
    after, second = await say(door, input=[output(reply["output"][0], "sun")], **fields)
    assert_extends(second, first)
    assert after["previous_response_id"] == reply["id"]
    assert [message["role"] for message in second.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]


async def test_instructions_are_not_carried_over(door: Door) -> None:
    door.will_say("one", "two")
    reply, first = await say(door, instructions="Help.")
    _, second = await say(door, input="so?", previous_response_id=reply["id"])
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert second.parent_turn_id == first.turn_id
    assert (await door.turn(first.turn_id)).next_state == [{"role": "user", "content": "so?"}]


async def test_equal_conversations_are_told_apart_by_the_response(door: Door) -> None:
    door.will_say("Hello.", "Hello.", "One.", "Two.")
    _, first = await say(door)
    other, second = await say(door)
    _, later = await say(door, input="so?", previous_response_id=other["id"])
    assert later.parent_turn_id == second.turn_id
    assert (await door.turn(first.turn_id)).next_state == []


async def test_the_state_outlives_the_proxy(door: Door) -> None:
    door.will_say(CALL, "Sunny.")
    sent, first = await say(
        door,
        tools=[TOOL],
        instructions="Help.",
        metadata={"a": "b"},
        max_output_tokens=70,
        temperature=0.5,
    )
    deps = ProxyDeps(
        store=door.store, engine=door.engine, rendering=door.rendering, config=ProxyConfig()
    )
    app = create_app(deps)
    transport = httpx.ASGITransport(app=app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        app.router.lifespan_context(app),
    ):
        url = f"/v1/responses/{sent['id']}"
        assert (await client.get(url)).json() == sent
        listed = (await client.get(f"{url}/input_items")).json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["hi"]
        body = {
            "model": "policy",
            "tools": [TOOL],
            "instructions": "Help.",
            "previous_response_id": sent["id"],
            "input": [output(sent["output"][0], "sun")],
        }
        after = (await client.post("/v1/responses", json=body)).json()
    assert_extends(await door.turn(after["id"].removeprefix("resp_")), first)


async def test_what_is_read_again_is_what_was_sent(door: Door) -> None:
    text = "<think>\nhm\n</think>\n\nLet me see.\n" + CALL
    for line in (door.line(text), door.line("Let me", end=False, finish_reason="length")):
        door.will_say(line)
        sent, _ = await say(door, tools=[TOOL], user="me", parallel_tool_calls=True)
        assert (await door.client.get(f"/v1/responses/{sent['id']}")).json() == sent


async def test_items_can_be_referred_to(door: Door) -> None:
    door.will_say(CALL, "Sunny.")
    reply, first = await say(door, tools=[TOOL])
    (item,) = reply["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    history = [{"role": "user", "content": "hi"}, reference, output(item, "sun")]
    _, second = await say(door, tools=[TOOL], input=history)
    assert_extends(second, first)


async def test_references_lead_to_so_many_responses_at_most(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read with its whole history."""
    monkeypatch.setattr("api_proxy.responses_api.stored._MAX_REFERRED", 1)
    door.will_say("one", "two")
    sent = [(await say(door, input=text))[0]["output"][0] for text in ("a", "b")]
    references = [{"type": "item_reference", "id": item["id"]} for item in sent]
    refused = await post(door, input=references)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "array_above_max_length"


async def test_deleted_and_unstored_responses_cannot_be_read(door: Door) -> None:
    door.will_say("one", "two", "three")
    kept, turn = await say(door)
    unstored, _ = await say(door, store=False)
    assert (await door.client.delete(f"/v1/responses/{kept['id']}")).json()["deleted"] is True
    for response_id in (kept["id"], unstored["id"], "resp_x", f"resp_{'0' * 32}"):
        for path in ("", "/input_items", "/cancel"):
            method = "POST" if path == "/cancel" else "GET"
            found = await door.client.request(method, f"/v1/responses/{response_id}{path}")
            assert found.status_code == 404
        assert (await door.client.delete(f"/v1/responses/{response_id}")).status_code == 404
        assert (await post(door, previous_response_id=response_id)).status_code == 404
    assert (await door.turn(turn.turn_id)).response["content"] == "one"


async def test_another_key_cannot_read_or_continue(door: Door) -> None:
    door.will_say(CALL)
    mine = {"Authorization": "Bearer mine"}
    sent = (await post(door, mine, tools=[TOOL])).json()
    url = f"/v1/responses/{sent['id']}"
    assert (await door.client.get(url, headers=mine)).status_code == 200
    assert (await door.client.get(url)).status_code == 404
    assert (await door.client.delete(url)).status_code == 404
    assert (await post(door, previous_response_id=sent["id"])).status_code == 404
    reference = [{"type": "item_reference", "id": sent["output"][0]["id"]}]
    refused = await post(door, input=reference)
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_pages_of_input_items(door: Door) -> None:
    door.will_say("ok")
    history = [{"role": "user", "content": str(number)} for number in range(3)]
    sent, _ = await say(door, input=history)
    url = f"/v1/responses/{sent['id']}/input_items"
    page = (await door.client.get(url, params={"limit": 2, "order": "asc"})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    rest = {"limit": 2, "order": "asc", "after": page["last_id"]}
    assert len((await door.client.get(url, params=rest)).json()["data"]) == 1
    for bad in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
        assert (await door.client.get(url, params=bad)).status_code == 400
    assert (await door.client.get(url[:-12], params={"stream": "true"})).status_code == 400


async def test_a_conversation_goes_through_all_doors(door: Door) -> None:
    door.will_say("one", "two", "three", "four")
    _, first = await say(door)
    said = {"role": "assistant", "content": "one"}
    messages = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "b"}]
    body = {"model": "policy", "max_tokens": 50, "messages": messages}
    message = (await door.client.post("/v1/messages", json=body)).json()
    second = await door.turn(message["id"].removeprefix("msg_"))
    assert_extends(second, first)
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "c"}]
    _, third = await door.say(messages)
    assert_extends(third, second)
    messages += [{"role": "assistant", "content": "three"}, {"role": "user", "content": "d"}]
    _, fourth = await say(door, input=messages)
    assert_extends(fourth, third)


async def test_tokens_are_counted_as_they_will_be_sent(door: Door) -> None:
    body = {"model": "policy", "input": "hi", "tools": [TOOL], "instructions": "Help."}
    counted = (await door.client.post("/v1/responses/input_tokens", json=body)).json()
    door.will_say("ok")
    sent, _ = await say(door, tools=[TOOL], instructions="Help.")
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": sent["usage"]["input_tokens"],
    }


async def test_logprobs_are_listed_with_the_text(door: Door) -> None:
    door.will_say("ok")
    sent, turn = await say(door, include=["message.output_text.logprobs"])
    entries = sent["output"][0]["content"][0]["logprobs"]
    assert len(entries) == len(turn.response_ids)


async def test_a_store_that_is_away(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_args: Any, **_kwargs: Any) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(door.store, "request_echo", fail)
    refused = await post(door, previous_response_id=f"resp_{'0' * 32}")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "store_unavailable"


async def test_the_official_client_reads_a_stream(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.will_say("<think>\nhm\n</think>\n\nLet me see.\n" + CALL)
    async with agent.responses.stream(model="policy", input="hi", tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds.count("response.output_text.delta") > 1
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert response.output_text == "Let me see."
    read = await agent.responses.retrieve(response.id)
    assert read.model_dump(exclude={"output"}) == response.model_dump(exclude={"output"})
    assert [item.id for item in read.output] == [item.id for item in response.output]
    items = await agent.responses.input_items.list(response.id)
    assert [item.type for item in items.data] == ["message"]
    await agent.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await agent.responses.retrieve(response.id)


@pytest.mark.parametrize("settings", [{"max_continuations": 2}])
async def test_a_stream_that_breaks_off_fails(door: Door, agent: openai.AsyncOpenAI) -> None:
    door.will_say(door.line("Hello, world", fail_at=3), *[EngineUnavailable("gone")] * 8)
    events = [e async for e in await agent.responses.create(model="policy", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None


async def test_an_unlisted_fault_before_the_stream_is_an_error(
    door: Door, agent: openai.AsyncOpenAI
) -> None:
    door.will_say(EngineUnavailable("gone"))
    with pytest.raises(openai.InternalServerError) as caught:
        await agent.responses.create(model="policy", input="x", stream=True)
    assert caught.value.status_code == 503
