"""Prompts extend earlier turns' ids; sampled ids are never tokenised again."""

from __future__ import annotations

import pytest

from api_proxy.linking.tokens import ParentTokens, TokenCache
from records.types import TurnRecord
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import WEATHER, Door
from tests.api_proxy.scripted_engine import Line
from tests.messages import user

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def odd_ids(rendering: Rendering, text: str) -> list[int]:
    """`text` tokenised as no tokenizer would: each character alone."""
    ids = [
        token
        for char in text
        for token in rendering.tokenizer.encode(char, add_special_tokens=False)
    ]
    assert ids != rendering.tokenizer.encode(text, add_special_tokens=False)
    return [*ids, rendering.stop_token_ids[0]]


def starts_with(turn: TurnRecord, parent: TurnRecord) -> bool:
    known = parent.prompt_ids.tolist() + parent.response_ids.tolist()
    return turn.prompt_ids.tolist()[: len(known)] == known


async def how_built(door: Door, how: str) -> float:
    registry = door.app.state.service.metrics.registry
    return registry.get_sample_value("opd_bridge_total", {"how": how}) or 0.0


@pytest.mark.parametrize("settings", [{}, {"token_cache_tokens": 0}])
async def test_tool_results_extend_the_sampled_ids(door: Door) -> None:
    call = CALL.removeprefix("<tool_call>")
    ids = door.rendering.tokenizer.encode("<tool_call>", add_special_tokens=False)
    line = Line(ids=ids + odd_ids(door.rendering, call.removesuffix("</tool_call>"))[:-1])
    line.ids += door.rendering.tokenizer.encode("</tool_call><|im_end|>", add_special_tokens=False)
    door.will_say(line, "Warm.")
    message, first = await door.say([user("weather?")], tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    _, second = await door.say([user("weather?"), message, result], tools=[WEATHER])
    assert first.response_ids.tolist() == line.ids
    assert starts_with(second, first)
    assert second.prompt_ids.tolist() == door.engine.prompts[1]
    assert await how_built(door, "extended") == 1


async def test_the_engine_is_given_what_the_template_means(door: Door) -> None:
    door.will_say(CALL, "Warm.")
    message, _ = await door.say([user("weather?")], tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    history = [user("weather?"), message, result]
    _, second = await door.say(history, tools=[WEATHER])
    assert second.prompt_ids.tolist() == door.rendering.prompt_ids(history, [WEATHER]).tolist()


async def test_other_tools_mean_a_full_render(door: Door) -> None:
    door.will_say(CALL, "Warm.")
    message, _ = await door.say([user("weather?")], tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    await door.say([user("weather?"), message, result])
    assert await how_built(door, "extended") == 0
    assert await how_built(door, "full") == 2


async def test_a_stop_string_means_a_full_render(door: Door) -> None:
    door.will_say(door.line("Hello END", end=False, matched="END"), "Fine.")
    message, _ = await door.say([user("hi")], stop=["END"])
    history = [user("hi"), message, user("bye")]
    _, second = await door.say(history)
    assert "END" not in door.rendering.decode(second.prompt_ids)
    assert second.prompt_ids.tolist() == door.rendering.prompt_ids(history, []).tolist()


@pytest.mark.parametrize("settings", [{"render_offload_chars": 10}])
async def test_long_histories_are_rendered_in_a_thread(door: Door) -> None:
    door.will_say("Hello.")
    messages = [user("a long message " * 50)]
    _, turn = await door.say(messages)
    assert turn.prompt_ids.tolist() == door.rendering.prompt_ids(messages, []).tolist()


async def test_forced_ids_stay_in_the_prompt_of_the_next_turn(door: Door) -> None:
    door.will_say(CALL.removeprefix("<tool_call>"), "Warm.")
    message, first = await door.say([user("weather?")], tools=[WEATHER], tool_choice="required")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    history = [user("weather?"), message, result]
    _, second = await door.say(history, tools=[WEATHER])
    assert starts_with(second, first)
    assert second.prompt_ids.tolist() == door.rendering.prompt_ids(history, [WEATHER]).tolist()


def test_cache_forgets_the_oldest(rendering: Rendering) -> None:
    ids = rendering.prompt_ids([user("hi")], [])
    turns = [
        ParentTokens(turn_id=str(index), prompt_ids=ids, response_ids=ids, tools=[])
        for index in range(3)
    ]
    cache = TokenCache(max_tokens=4 * len(ids))
    cache.add(turns[0])
    cache.add(turns[1])
    assert cache.get("0") is turns[0]
    cache.add(turns[2])
    assert cache.get("1") is None
    assert cache.get("0") is turns[0]
    cache.add(turns[0])
    assert cache.get("2") is turns[2]
