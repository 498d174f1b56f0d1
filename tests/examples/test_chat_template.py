"""The shipped chat template and the configured renderer give the same ids for every kind of
conversation.
"""

import json
import random

import pytest

from examples.tool_lab.corpus import agent_row, hinted_row
from examples.tool_lab.domain import TOOLS, assistant_call, tool_message
from examples.tool_lab.local_generate import RENDERER
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL

SYSTEM = {"role": "system", "content": "You are a travel assistant."}
USER = {"role": "user", "content": "Weather for Brakol please."}
CALL = assistant_call("get_weather", {"city": "Brakol"}, "c1")
SECOND_CALL = assistant_call("find_hotels", {"city": "Brakol", "sort": "price"}, "c2")
TOOL = tool_message("c1", '{"temp_c": 3, "temp_f": 37, "sky": "fog"}')
ANSWER = {"role": "assistant", "content": "In Celsius: 3 in Brakol, fog."}
WITH_OBJECT = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Zürich ü"}}}],
}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, CALL, TOOL],
    [SYSTEM, USER, CALL, TOOL, ANSWER],
    [SYSTEM, USER, CALL, TOOL, ANSWER, USER, SECOND_CALL, tool_message("c2", "[]"), ANSWER, USER],
    [USER, {**CALL, "tool_calls": [*CALL["tool_calls"], *SECOND_CALL["tool_calls"]]}, TOOL, TOOL],
    [USER, {**CALL, "content": None}, TOOL, USER],
    [USER, WITH_OBJECT, TOOL, USER],
    [SYSTEM, USER, ANSWER, {"role": "system", "content": "Be brief."}, USER],
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "2"}],
        }
    ],
    [{"role": "user", "content": "  \n odd\r\n\n  white\tspace  \n"}],
    [
        {"role": "user", "content": "日本 émoji 🙂 <tool_call> <|im_end|>"},
        {**ANSWER, "content": ""},
    ],
]


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), RENDERER)


def template_ids(rendering: Rendering, messages: list, tools: list, prompt: bool) -> list[int]:
    return rendering.tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=prompt,
        tokenize=True,
        return_dict=False,
    )


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
def test_template_equals_renderer(rendering, tools, prompt):
    for messages in CONVERSATIONS:
        rendered = rendering._renderer.render_ids(
            messages, tools=tools or None, add_generation_prompt=prompt
        )
        assert template_ids(rendering, messages, tools, prompt) == rendered, json.dumps(messages)


def test_template_equals_renderer_on_the_corpus(rendering):
    for seed in range(40):
        for row in (agent_row(random.Random(seed)), hinted_row(random.Random(seed))):
            expected = template_ids(rendering, row.messages, row.tools, True)
            assert rendering.prompt_ids(row.messages, row.tools).tolist() == expected


def test_prompts_extend_without_retokenising(rendering):
    prompt = rendering.prompt_ids([SYSTEM, USER], TOOLS)
    whole = rendering.prompt_ids([SYSTEM, USER, CALL, TOOL], TOOLS)
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    response = whole[len(prompt) : len(prompt) + whole[len(prompt) :].tolist().index(end) + 1]
    extended = rendering.extend(prompt, response, [TOOL], TOOLS)
    assert extended is not None
    assert extended.tolist() == whole.tolist()


def test_names_and_numbers_are_the_same_tokens_everywhere(rendering):
    tokenizer = rendering.tokenizer
    for name in ("Brakol", "Qyxwe", "EUR"):
        alone = tokenizer.encode(name)
        for text in (f"in {name}?", f'"{name}"', f"({name})", f"a\n{name},", f": {name}."):
            ids = tokenizer.encode(text)
            assert any(ids[i : i + len(alone)] == alone for i in range(len(ids))), text
    assert tokenizer.encode("42")[-2:] == tokenizer.encode(" 42")[-2:]
    assert len(tokenizer) == 768


def test_every_text_survives_a_round_trip(rendering):
    for text in ('{"city": "Brakol"}', "  two  spaces\n\n", "日本 🙂", "\\boxed{-1}"):
        assert rendering.decode(rendering.tokenizer.encode(text)) == text
