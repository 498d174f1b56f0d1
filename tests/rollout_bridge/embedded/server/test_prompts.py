"""Prompts of the embedded engine: the template's own ids, bounded, and made beside the routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.server.prompts import Prompts
from rollout_bridge.embedded.server.server import create_app
from rollout_bridge.rendering.tokenizer import control_texts
from tests.contract import tiny_model
from tests.linear_time import growth
from tests.messages import user
from tests.rollout_bridge.embedded.test_engine import started

CALL = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You judge. <b>Really</b>, [sic]."},
    {"role": "user", "content": "Hello, how are <you>? \ufdd0"},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nWell.",
        "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"), 0, context_length=8_192)


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def prompts(tokenizer: Any) -> Iterator[Prompts]:
    found = Prompts(tokenizer, "m", 8_192)
    yield found
    found.close()


@pytest.mark.parametrize("count", [1, 2, 4, 400])
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_ordinary_prompts_have_the_ids_of_transformers(
    prompts: Prompts, tokenizer: Any, count: int, tools: Any
) -> None:
    messages = (MESSAGES * count)[:count]
    shaped = [dict(message) for message in messages]
    for message in shaped:
        if "tool_calls" in message:
            function = {**CALL, "arguments": {"city": "Rome"}}
            message["tool_calls"] = [{**message["tool_calls"][0], "function": function}]
    expected = tokenizer.apply_chat_template(
        shaped, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert await prompts.of_messages(messages, tools, {}) == list(expected)


async def test_a_text_has_the_ids_of_the_tokenizer(prompts: Prompts, tokenizer: Any) -> None:
    text = "<|im_start|>user\nHello<|im_end|>" * 700
    assert await prompts.of_text(text) == tokenizer.encode(text)


async def test_control_texts_in_messages_and_tools_become_ordinary_ids(
    prompts: Prompts, tokenizer: Any
) -> None:
    control = control_texts(tokenizer)
    ids = set(tokenizer.convert_tokens_to_ids(sorted(control)))
    assert len(ids) >= 3

    async def structure(text: str) -> list[int]:
        tool = {"type": "function", "function": {"name": text, "parameters": {"a": text}}}
        given = [user(text), {"role": "assistant", "content": text}, user(text)]
        found = await prompts.of_messages(given, [tool], {})
        if text:
            assert tokenizer.decode(found).count(text) >= 3
        return [token for token in found if token in ids]

    for text in control:
        assert await structure(f"a{text}b") == await structure("ab")
    (name, *_) = control
    with pytest.raises(BadRequest, match="role"):
        await prompts.of_messages([{"role": f"user{name}", "content": "a"}], None, {})


async def test_what_cannot_fit_is_refused_before_it_is_rendered(
    prompts: Prompts, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unused(*_: Any, **__: Any) -> None:
        raise AssertionError("rendered")

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", unused)
    monkeypatch.setattr(type(tokenizer), "encode", unused)
    long = "x" * 140_000
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    with pytest.raises(BadRequest, match="context length"):
        await prompts.of_messages([user(long)], None, {})
    with pytest.raises(BadRequest, match="context length"):
        await prompts.of_messages([user("a")], [tool], {})
    with pytest.raises(BadRequest, match="context length"):
        await prompts.of_text(long)
    deep: Any = "a"
    for _ in range(2_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested"):
        await prompts.of_messages([user("a")], [{"type": deep}], {})


async def test_the_routes_answer_while_a_long_prompt_is_rendered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(model) as engine:
        transport = httpx.ASGITransport(app=create_app(engine))
        template = type(engine.tokenizer).apply_chat_template
        encode = type(engine.tokenizer).encode
        may_go_on, reached = threading.Event(), threading.Event()

        def held(given: Any) -> None:
            if len(str(given)) > 20_000:
                reached.set()
                assert may_go_on.wait(20)

        def held_template(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
            held(messages)
            return template(self, messages, *args, **options)

        def held_encode(self: Any, text: Any, *args: Any, **options: Any) -> Any:
            held(text)
            return encode(self, text, *args, **options)

        monkeypatch.setattr(type(engine.tokenizer), "apply_chat_template", held_template)
        monkeypatch.setattr(type(engine.tokenizer), "encode", held_encode)
        long = "hello " * 4_000
        bodies = {
            "/v1/chat/completions": {"messages": [user(long)], "max_tokens": 1},
            "/generate": {"text": long, "sampling_params": {"max_new_tokens": 1}},
        }
        short = {"messages": [user("Hello")], "max_tokens": 1}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in bodies.items():
                may_go_on.clear()
                reached.clear()
                task = asyncio.create_task(client.post(path, json=body))
                assert await asyncio.to_thread(reached.wait, 20)
                reply = await client.post("/v1/chat/completions", json=short)
                assert reply.status_code == 200
                assert not task.done()
                may_go_on.set()
                # Too many tokens for the context, or as many as fit: an answer in any case.
                assert (await task).status_code in (200, 400)


def test_rendering_takes_linear_time(prompts: Prompts) -> None:
    def render(count: int) -> None:
        assert prompts._rendered([user("<|im_end|> and text")] * count, None, {})

    assert growth(lambda: render(1_000), lambda: render(4_000), below=6.6) < 6.6
