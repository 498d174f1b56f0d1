"""The judge's route, through the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from rollout_bridge.engine.client import EngineClient

MESSAGES = [
    {"role": "system", "content": "You judge."},
    {"role": "user", "content": "Hello, how are you?"},
]


@pytest.fixture
async def judge(engine_url: str, engine_key: str | None) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(
        base_url=f"{engine_url}/v1", api_key=engine_key or "none", max_retries=0, timeout=60
    )
    yield client
    await client.close()


async def model_name(judge: openai.AsyncOpenAI) -> str:
    return (await judge.models.list()).data[0].id


async def test_the_prompt_is_the_models_chat_template(judge, tokenizer) -> None:
    reply = await judge.chat.completions.create(
        model=await model_name(judge), messages=MESSAGES, max_tokens=6, temperature=0
    )
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert reply.usage.prompt_tokens == len(ids)
    assert 1 <= reply.usage.completion_tokens <= 6
    assert reply.choices[0].finish_reason in ("stop", "length")


async def test_streamed_choice_says_the_same(judge) -> None:
    options = {
        "model": await model_name(judge),
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = await judge.chat.completions.create(**options)
    text, reasons, usage = "", [], None
    stream = await judge.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == (whole.choices[0].message.content or "")
    assert reasons == [whole.choices[0].finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_logprobs_come_with_their_alternatives(judge) -> None:
    reply = await judge.chat.completions.create(
        model=await model_name(judge),
        messages=MESSAGES,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    for entry in reply.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


async def test_several_choices(judge) -> None:
    reply = await judge.chat.completions.create(
        model=await model_name(judge), messages=MESSAGES, max_tokens=4, n=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]


async def test_bad_requests_have_openais_shape(judge, client: EngineClient) -> None:
    name = await model_name(judge)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await judge.chat.completions.create(model=name, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        await judge.chat.completions.create(model=name, messages=MESSAGES, max_tokens=10**6)
    length = (await client.model_info()).context_length
    assert length is not None
    long = [{"role": "user", "content": "Hello " * length}]
    with pytest.raises(openai.BadRequestError):
        await judge.chat.completions.create(model=name, messages=long, max_tokens=2)
