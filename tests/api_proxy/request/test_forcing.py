"""The grammar of a request, as the embedded engine reads it: what may be sampled under it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from api_proxy.access.request_limits import RequestLimits
from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError
from api_proxy.request.completion import completion_of
from api_proxy.request.forcing import Constraint, ReplyShaper
from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.model.grammar import GrammarCompiler
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL
from tests.rollout_bridge.family_tokenizers import EVERYTHING, write_family

LIMITS = RequestLimits(config=ProxyConfig(), context_length=None)
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
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return GrammarCompiler(tokenizer, shaped.vocab_size, frozenset(shaped.stop_token_ids), 2**20)


def constraint_of(rendering: Rendering, fields: dict) -> Constraint:
    body = {"model": "m", "messages": MESSAGES, "tools": TOOLS, **fields}
    prompt = rendering.prompt_ids(MESSAGES, TOOLS)
    return ReplyShaper(rendering).constraint(completion_of(body, {}, LIMITS), prompt)


def accepts(
    rendering: Rendering, compiler: GrammarCompiler, constraint: Constraint, text: str
) -> bool:
    """Whether the forced ids and then the grammar lead to `text` and its end."""
    assert constraint.grammar is not None
    ids = rendering.tokenizer.encode(text, add_special_tokens=False)
    forced = list(constraint.forced_ids)
    if ids[: len(forced)] != forced:
        return False
    matcher = asyncio.run(compiler.matcher(constraint.grammar.kind, constraint.grammar.text))
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
        ({"regex": r"a+/\d", "tool_choice": "none"}, ["a/1", "aa/2"], ["/1", "a\\/1", CALL]),
        ({"guided_regex": r"x\/y", "tool_choice": "none"}, ["x/y"], ["xy", ""]),
        ({"regex": "a\nb", "tool_choice": "none"}, ["a\nb"], ["ab"]),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no", CALL], ["maybe", "yes "]),
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


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": SCHEMA}])
def test_a_template_of_single_calls_cannot_be_held_to_them(tmp_path: Path, fields: dict) -> None:
    folder = write_family(tmp_path / "model", EVERYTHING)
    llama = Rendering.load(folder, RendererConfig(name="llama-3"))
    with pytest.raises(ApiError) as refused:
        constraint_of(llama, fields)
    assert refused.value.status == 400
