"""The grammar of a request, as the embedded engine reads it: what may be sampled under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from api_proxy.forcing import Constraint, ReplyShaper
from api_proxy.schemas import ChatRequest
from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.grammar import GrammarCompiler
from rollout_bridge.rendering import Rendering
from tests.examples.shipped import MODEL

MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "noop"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "n": 3}}\n</tool_call>'
NOOP = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
NUMBER = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {**NUMBER, "$defs": {"b": {"type": "integer"}}}},
}
NAMED = {"type": "function", "function": {"name": "noop"}}


@pytest.fixture(scope="module", params=[False, True])
def shaped(request: pytest.FixtureRequest) -> Rendering:
    """Prompts that close the reasoning, and prompts that leave it open whether there is any."""
    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=request.param))


@pytest.fixture(scope="module")
def compiler(shaped: Rendering) -> GrammarCompiler:
    return GrammarCompiler(shaped.tokenizer, shaped.vocab_size, frozenset(shaped.stop_token_ids))


def constraint_of(rendering: Rendering, fields: dict) -> Constraint:
    body = {"model": "m", "messages": MESSAGES, "tools": TOOLS, **fields}
    prompt = rendering.prompt_ids(MESSAGES, TOOLS)
    return ReplyShaper(rendering).constraint(ChatRequest.model_validate(body), TOOLS, prompt)


def accepts(
    rendering: Rendering, compiler: GrammarCompiler, constraint: Constraint, text: str
) -> bool:
    """Whether the forced ids and then the grammar lead to `text` and its end."""
    assert constraint.grammar is not None
    ids = rendering.tokenizer.encode(text, add_special_tokens=False)
    forced = list(constraint.forced_ids)
    if ids[: len(forced)] != forced:
        return False
    matcher = compiler.matcher(constraint.grammar.kind, constraint.grammar.text)
    for token in [*ids[len(forced) :], rendering.stop_token_ids[0]]:
        logits_V = torch.zeros(rendering.vocab_size)
        matcher.mask(logits_V)
        if logits_V[token] == -torch.inf:
            return False
        assert matcher.take(token) is None
    return True


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [CALL, NOOP, CALL + "\n" + NOOP],
            [
                CALL + "x",
                CALL.replace("3", '"3"'),
                CALL.replace("city", "town"),
                "hello",
                NOOP.replace("noop", "other"),
                NOOP.replace("{}", '{"a": 1}'),
            ],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [CALL, NOOP],
            [CALL + "\n" + NOOP],
        ),
        ({"tool_choice": NAMED}, [NOOP], [CALL, NOOP + "\n" + NOOP]),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', CALL], ["[1]", "x", ""]),
        ({"response_format": SCHEMA, "tool_choice": "none"}, ['{"a": 1}'], [CALL, '{"a": "1"}']),
    ],
)
def test_what_the_reply_may_be(
    shaped: Rendering, compiler: GrammarCompiler, fields: dict, good: list, bad: list
) -> None:
    constraint = constraint_of(shaped, fields)
    assert [accepts(shaped, compiler, constraint, text) for text in good] == [True] * len(good)
    assert [accepts(shaped, compiler, constraint, text) for text in bad] == [False] * len(bad)


def test_reasoning_may_come_before_an_answer_where_the_prompt_leaves_it_open(
    shaped: Rendering, compiler: GrammarCompiler
) -> None:
    constraint = constraint_of(shaped, {"response_format": {"type": "json_object"}})
    is_open = "</think>" not in shaped.decode(shaped.prompt_ids(MESSAGES))
    reasoned = '<think>\nhm {"b"}\n</think>\n\n{"a": 1}'
    assert accepts(shaped, compiler, constraint, reasoned) is is_open


@pytest.mark.parametrize(
    "fields",
    [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}],
)
def test_a_free_reply(shaped: Rendering, fields: dict) -> None:
    assert constraint_of(shaped, fields) == Constraint()
