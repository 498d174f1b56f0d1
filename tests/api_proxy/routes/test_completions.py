"""Replies without streaming, and what is recorded of them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace

import pytest

from api_proxy.config import SideRule
from records.names import DropReason, TurnState, TurnType
from rollout_bridge.engine.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from tests.api_proxy.conftest import WEATHER, Door
from tests.records.looking import list_turns

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_text_reply_and_its_record(door: Door) -> None:
    door.will_say("Hello, world!")
    response = await door.post([USER])
    body = response.json()
    assert response.status_code == 200
    choice = body["choices"][0]
    assert choice["message"]["content"] == "Hello, world!"
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    turn = await door.turn(body["id"].removeprefix("chatcmpl-"))
    assert response.headers["x-session-id"] == turn.session_id
    assert turn.state is TurnState.AWAITING_NEXT_STATE
    assert turn.prompt_ids.tolist() == door.engine.prompts[0]
    assert turn.prompt_ids.tolist() == door.rendering.prompt_ids([USER], []).tolist()
    assert turn.response_ids[-1] == door.rendering.stop_token_ids[0]
    assert len(turn.rollout_logprobs) == len(turn.response_ids)
    assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
        (0, 0, len(turn.response_ids))
    ]
    assert body["usage"] == {
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.response_ids),
        "total_tokens": len(turn.prompt_ids) + len(turn.response_ids),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_tool_call_reply(door: Door) -> None:
    door.will_say("Let me see.\n" + CALL)
    response = await door.post([USER], tools=[WEATHER])
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert call["id"] == f"call_{response.headers['x-turn-id']}00"


async def test_call_without_a_readable_name_is_content(door: Door) -> None:
    door.will_say("<tool_call>\nnot json\n</tool_call>")
    message, turn = await door.say([USER], tools=[WEATHER])
    assert "tool_calls" not in message
    assert "not json" in message["content"]
    assert turn.response["content"] == message["content"]


async def test_tool_choice_none_gives_the_call_as_text(door: Door) -> None:
    door.will_say(CALL)
    message, turn = await door.say([USER], tools=[WEATHER], tool_choice="none")
    assert message["content"] == CALL
    assert turn.tools == [WEATHER]


@pytest.mark.parametrize(
    ("choice", "callable_names"),
    [
        ("required", [["get_weather", "noop"]] * 2),
        ({"type": "function", "function": {"name": "get_weather"}}, [["get_weather"]]),
    ],
)
async def test_required_calls(door: Door, choice: object, callable_names: list) -> None:
    said = CALL.removeprefix("<tool_call>")
    door.will_say(said)
    noop = {"type": "function", "function": {"name": "noop"}}
    message, turn = await door.say([USER], tools=[WEATHER, noop], tool_choice=choice)
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    prompt = door.rendering.decode(turn.prompt_ids)
    assert prompt.endswith("<|im_start|>assistant\n<tool_call>")
    assert door.rendering.decode(turn.response_ids).startswith(said)
    grammar = door.engine.params[0].grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    heads = re.findall(r'name\\": \\"(\w+)', grammar.text)
    assert heads == [name for names in callable_names for name in names]
    assert turn.sampling["grammar"] == grammar.text
    assert turn.distribution_modified == "grammar"
    assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}])
async def test_one_call_at_most(door: Door, fields: dict) -> None:
    door.will_say(door.line(CALL, end=False))
    fields["parallel_tool_calls"] = False
    response = await door.post([USER], tools=[WEATHER], **fields)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    end = door.rendering.tool_call_end_id
    assert door.engine.params[0].stop_token_ids == (*door.rendering.stop_token_ids, end)
    turn = await door.turn(response.headers["x-turn-id"])
    assert turn.response_ids[-1] == end
    assert turn.drop_reason is None


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
            {"type": "array"},
        ),
    ],
)
async def test_response_format(door: Door, asked: dict, schema: dict) -> None:
    door.will_say("[1]", "[1]")
    _, turn = await door.say([USER], response_format=asked)
    grammar = json.loads(door.engine.params[0].grammar.text)
    *_, body = grammar["format"]["elements"]
    assert body == {"type": "json_schema", "json_schema": schema}
    assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED
    await door.say([USER], response_format=asked, tools=[WEATHER])
    *_, body = json.loads(door.engine.params[1].grammar.text)["format"]["elements"]
    assert body["type"] == "or"
    door.will_say("Hello.")
    _, plain = await door.say([USER], response_format={"type": "text"})
    assert plain.distribution_modified is None


@pytest.mark.parametrize("stream", [False, True])
async def test_broken_off_reply_under_a_grammar(door: Door, stream: bool) -> None:
    door.will_say(door.line('{"a": 1}', abort_at=3), '{"b": 2}')
    asked = {"type": "json_object"}
    response = await door.post([USER], response_format=asked, stream=stream)
    (turn, *_) = await list_turns(door.store)
    if stream:
        # What was sent cannot be taken back, and the grammar does not go on in its midst.
        assert '"code":"engine_unavailable"' in response.text
        assert turn.drop_reason is DropReason.ABORTED
        return
    assert response.json()["choices"][0]["message"]["content"] == '{"b": 2}'
    assert door.engine.prompts[1] == door.engine.prompts[0]
    whole = await door.turn(turn.turn_id)
    assert door.rendering.decode(whole.response_ids[:-1]) == '{"b": 2}'


@pytest.mark.parametrize("pause_mode", ["abort"])
async def test_where_updates_break_off_a_reply_under_a_grammar_is_streamed_whole(
    door: Door,
) -> None:
    door.will_say(door.line('{"a": 1}', abort_at=3), door.line('{"b": 2}', abort_at=2), "[3]")
    asked = {"type": "json_object"}
    response = await door.post([USER], response_format=asked, stream=True)
    (turn, *_) = await list_turns(door.store)
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    texts = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(text for text in texts if text) == "[3]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [len(prompt) for prompt in door.engine.prompts] == [len(door.engine.prompts[0])] * 3
    whole = await door.turn(turn.turn_id)
    assert door.rendering.decode(whole.response_ids[:-1]) == "[3]"
    assert whole.sampling["num_continuations"] == 2


@pytest.mark.parametrize("pause_mode", ["abort"])
@pytest.mark.parametrize("settings", [{"max_continuations": 2}])
async def test_a_reply_is_not_sampled_anew_for_ever(door: Door) -> None:
    door.will_say(*[door.line('{"a": 1}', abort_at=3)] * 3)
    response = await door.post([USER], response_format={"type": "json_object"})
    assert response.status_code == 503
    (turn, *_) = await list_turns(door.store)
    assert turn.drop_reason is DropReason.ABORTED


async def test_logit_bias(door: Door) -> None:
    door.will_say("ok")
    _, turn = await door.say([USER], logit_bias={"7": -100})
    assert door.engine.params[0].logit_bias == ((7, -100.0),)
    assert turn.sampling["logit_bias"] == {"7": -100.0}
    assert turn.distribution_modified == "logit_bias"


async def test_sampling_fields_reach_the_engine(door: Door) -> None:
    door.will_say("ok")
    _, turn = await door.say(
        [USER], temperature=0.7, top_p=0.9, max_completion_tokens=17, stop=["END"], seed=3
    )
    params = door.engine.params[0]
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.7, 0.9, 17)
    assert params.stop == ("END",)
    assert params.stop_token_ids == door.rendering.stop_token_ids
    assert turn.sampling["temperature"] == 0.7
    assert turn.sampling["seed"] == 3
    assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED
    assert turn.distribution_modified == "top_p"


async def test_temperature_zero_is_recorded_but_does_not_train(door: Door) -> None:
    door.will_say("ok")
    _, turn = await door.say([USER], temperature=0)
    assert turn.distribution_modified == "temperature_0"
    assert turn.drop_reason is DropReason.DISTRIBUTION_MODIFIED


@pytest.mark.parametrize("settings", [{"train_modified": "keep"}])
async def test_what_may_train_is_configured(door: Door) -> None:
    door.will_say("ok", door.line("Hello", end=False, finish_reason="length"))
    _, modified = await door.say([USER], temperature=0)
    _, cut = await door.say([USER])
    assert modified.state is TurnState.AWAITING_NEXT_STATE
    assert modified.distribution_modified == "temperature_0"
    assert cut.state is TurnState.AWAITING_NEXT_STATE


@pytest.mark.parametrize("settings", [{"train_length_cut": False}])
async def test_length_cut(door: Door) -> None:
    door.will_say(door.line("Hello, wor", end=False, finish_reason="length"))
    response = await door.post([USER], max_tokens=4)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    turn = await door.turn(response.headers["x-turn-id"])
    assert turn.drop_reason is DropReason.LENGTH_CUT


async def test_stop_string_is_not_shown_but_stored(door: Door) -> None:
    door.will_say(door.line("Hello END", end=False, matched="END"))
    message, turn = await door.say([USER], stop="END")
    assert message["content"].strip() == "Hello"
    assert door.rendering.decode(turn.response_ids) == "Hello END"


async def test_reasoning_is_split_off(door: Door) -> None:
    door.will_say("<think>\nLet me think.\n</think>\n\nHello.")
    message, _ = await door.say([USER])
    assert message["reasoning_content"] == "Let me think."
    assert message["content"] == "Hello."


async def test_empty_reply_does_not_train(door: Door) -> None:
    door.will_say("")
    message, turn = await door.say([USER])
    assert message["content"] == ""
    assert turn.drop_reason is DropReason.EMPTY_RESPONSE


async def test_side_turns(door: Door) -> None:
    door.will_say("a", "b", "c")
    _, by_header = await door.say([USER], {"X-Turn-Type": "side"})
    _, by_field = await door.say([USER], turn_type="side")
    _, main = await door.say([USER])
    assert by_header.drop_reason is by_field.drop_reason is DropReason.SIDE_TURN
    assert main.turn_type is TurnType.MAIN


@pytest.mark.parametrize(
    "settings", [{"side_rules": [SideRule(name="title", last_message_contains="a short title")]}]
)
async def test_side_rules(door: Door) -> None:
    door.will_say("Weather", "Hello")
    _, side = await door.say([{"role": "user", "content": "Write a short title for this chat."}])
    _, main = await door.say([USER])
    assert side.turn_type is TurnType.SIDE
    assert main.turn_type is TurnType.MAIN


async def test_several_versions_in_one_reply(door: Door) -> None:
    line = door.line("Hello, world!", version="4")
    line.spans = [("3", 2), ("4", len(line.ids))]
    door.will_say(line)
    _, turn = await door.say([USER])
    assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
        (3, 0, 2),
        (4, 2, len(line.ids)),
    ]
    assert turn.drop_reason is None


async def test_unknown_versions_do_not_train(door: Door) -> None:
    door.will_say(
        door.line("a", version="default"), door.line("b", spans=None), door.line("c", spans=None)
    )
    _, named = await door.say([USER])
    assert named.drop_reason is DropReason.UNKNOWN_VERSION
    _, changed = await door.say([USER])
    assert changed.drop_reason is DropReason.UNKNOWN_VERSION
    _, same = await door.say([USER])
    assert same.drop_reason is None


async def test_broken_off_reply_is_continued(door: Door) -> None:
    whole = door.line("Hello, world! How are you today?", abort_at=4)
    rest = door.line("", version="1")
    rest.ids = whole.ids[4:]
    door.will_say(whole, rest)
    message, turn = await door.say([USER], max_tokens=50)
    assert message["content"] == "Hello, world! How are you today?"
    assert turn.response_ids.tolist() == whole.ids
    assert door.engine.prompts[1] == door.engine.prompts[0] + whole.ids[:4]
    assert door.engine.params[1].max_new_tokens == 46
    assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
        (0, 0, 4),
        (1, 4, len(whole.ids)),
    ]
    assert turn.drop_reason is None


@pytest.mark.parametrize("settings", [{"max_continuations": 1}])
async def test_reply_that_is_broken_off_again_and_again(door: Door) -> None:
    line = door.line("Hello, world!", abort_at=0)
    door.will_say(line, line)
    response = await door.post([USER])
    assert response.status_code == 503
    assert await list_turns(door.store) == []


@pytest.mark.parametrize("settings", [{"max_continuations": 1}])
async def test_reply_that_makes_progress_is_continued_as_often_as_it_takes(door: Door) -> None:
    whole = door.line("Hello, world! How are you today?")
    parts = [replace(whole, ids=whole.ids[at:], abort_at=1) for at in range(len(whole.ids) - 1)]
    idle = replace(whole, abort_at=0)
    door.will_say(idle, *parts[:3], idle, *parts[3:], replace(whole, ids=whole.ids[-1:]))
    message, turn = await door.say([USER], max_tokens=50)
    assert message["content"] == "Hello, world! How are you today?"
    assert turn.response_ids.tolist() == whole.ids
    assert turn.sampling["num_continuations"] == len(parts) + 2
    assert turn.drop_reason is None


async def test_reply_that_is_broken_off_where_the_context_ends_is_cut(door: Door) -> None:
    line = door.line("Hello, world!", abort_at=4)
    door.will_say(line, EngineRejected(400, "too long"))
    message, turn = await door.say([USER], max_tokens=10)
    assert turn.response_ids.tolist() == line.ids[:4]
    assert (turn.finish_reason, turn.drop_reason) == ("length", None)
    assert door.rendering.decode(line.ids[:4]).startswith(message["content"])
    door.will_say(line, EngineRejected(400, "for no reason"))
    assert (await door.post([USER], max_tokens=100)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_the_place_where_a_reply_was_broken_off(
    door: Door, stream: bool
) -> None:
    whole = door.line("Sun and rain. Observation: 21 degrees in Paris today.")
    text = ""
    cut = next(n for n in range(len(whole.ids)) if "Observ" in door.rendering.decode(whole.ids[:n]))
    end = next(n for n in range(len(whole.ids)) if "ation:" in door.rendering.decode(whole.ids[:n]))
    assert cut < end
    rest = replace(whole, ids=whole.ids[cut:], version="1")
    door.will_say(replace(whole, abort_at=cut), rest)
    response = await door.post([USER], stop=["Observation:"], stream=stream)
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("Sun and rain. ", "stop")
    turn = await door.turn(response.headers["x-turn-id"])
    assert turn.response_ids.tolist() == whole.ids[:end]
    assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
        (0, 0, cut),
        (1, cut, end),
    ]
    assert (turn.finish_reason, turn.drop_reason) == ("stop", None)


async def test_seed_reaches_the_engine_and_the_store(door: Door) -> None:
    door.will_say("Hello", "Hello")
    _, turn = await door.say([USER], seed=-7)
    assert (door.engine.params[0].seed, turn.sampling["seed"]) == (-7, -7)
    _, turn = await door.say([USER])
    assert (door.engine.params[1].seed, turn.sampling["seed"]) == (None, None)
    assert (await door.post([USER], seed=2**63)).status_code == 400


async def test_engine_down(door: Door) -> None:
    door.will_say(EngineUnavailable("no connection"))
    response = await door.post([USER])
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert await list_turns(door.store) == []


async def test_answer_that_breaks_the_contract_is_asked_again_and_does_not_train(
    door: Door,
) -> None:
    door.will_say(EngineProtocolError("an output log-prob is not finite"), "Hello")
    message, turn = await door.say([USER])
    assert message["content"] == "Hello"
    assert turn.drop_reason is DropReason.ROLLOUT_LOGPROBS_INVALID


async def test_logprobs(door: Door) -> None:
    door.will_say("Hello")
    response = await door.post([USER], logprobs=True, top_logprobs=2)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    turn = await door.turn(response.headers["x-turn-id"])
    assert len(entries) == len(turn.response_ids)
    assert "".join(entry["token"] for entry in entries) == "Hello<|im_end|>"
    assert all(math.isclose(entry["logprob"], -0.5) for entry in entries)
    tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    assert tops == [[-0.5, -1.5]] * len(entries)


async def test_session_done_drops_the_last_turn_and_a_continuation_reopens_it(door: Door) -> None:
    door.will_say("Hello.", "Fine.")
    message, turn = await door.say([USER], session_done=True)
    assert (await door.turn(turn.turn_id)).drop_reason is DropReason.NO_NEXT_STATE
    await door.say([USER, message, {"role": "user", "content": "and?"}])
    reopened = await door.turn(turn.turn_id)
    assert reopened.state is TurnState.JUDGING
    assert reopened.next_state == [{"role": "user", "content": "and?"}]


@pytest.mark.parametrize("settings", [{"sweep_interval_s": 0.02}])
async def test_idle_sessions_are_closed(door: Door, clock) -> None:
    door.will_say("Hello.")
    _, turn = await door.say([USER])
    await asyncio.sleep(0.1)
    assert (await door.turn(turn.turn_id)).state is TurnState.AWAITING_NEXT_STATE
    clock.now += 3600
    async with asyncio.timeout(10):
        while (await door.turn(turn.turn_id)).state is not TurnState.DROPPED:
            await asyncio.sleep(0.02)
    assert (await door.turn(turn.turn_id)).drop_reason is DropReason.NO_NEXT_STATE
