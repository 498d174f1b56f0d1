"""Ids of a response that is only there as text."""

from __future__ import annotations

import numpy as np
import pytest

from records.messages import Message
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
]
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "21"},
    {"role": "assistant", "content": "21 degrees."},
    {"role": "user", "content": "Celsius?"},
    {"role": "assistant", "content": "Yes."},
]
RESPONSES = [index for index, one in enumerate(CONVERSATION) if one["role"] == "assistant"]


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))


@pytest.mark.parametrize("index", RESPONSES)
def test_a_prompt_that_is_known_already_changes_nothing(rendering: Rendering, index: int) -> None:
    messages, response = CONVERSATION[:index], CONVERSATION[index]
    fresh = rendering.recorded_response_ids(messages, response, TOOLS)
    prompt_ids = rendering.prompt_ids(messages, TOOLS)
    known = rendering.recorded_response_ids(messages, response, TOOLS, prompt_ids)
    np.testing.assert_array_equal(known, fresh)
    assert fresh[-1] in rendering.stop_token_ids
    assert response["content"] in rendering.decode(fresh)


def test_a_prompt_of_other_ids_does_not_move_the_response(rendering: Rendering) -> None:
    messages, response = CONVERSATION[:2], CONVERSATION[4]
    fresh = rendering.recorded_response_ids(messages, response, TOOLS)
    other = rendering.prompt_ids(messages, TOOLS)[::-1]
    np.testing.assert_array_equal(
        rendering.recorded_response_ids(messages, response, TOOLS, other), fresh
    )


def test_a_session_is_one_sequence(rendering: Rendering) -> None:
    before = None
    for index in RESPONSES:
        messages, response = CONVERSATION[:index], CONVERSATION[index]
        if before is None:
            prompt_ids = rendering.prompt_ids(messages, TOOLS)
        else:
            past, past_response, length = before
            extended = rendering.extend(past, past_response, messages[length:], TOOLS)
            assert extended is not None
            prompt_ids = extended
            np.testing.assert_array_equal(prompt_ids[: len(past)], past)
        response_ids = rendering.recorded_response_ids(messages, response, TOOLS, prompt_ids)
        np.testing.assert_array_equal(
            response_ids, rendering.recorded_response_ids(messages, response, TOOLS)
        )
        before = (prompt_ids, response_ids, index + 1)
