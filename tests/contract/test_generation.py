"""Sampled tokens and their log-probabilities, streamed and not."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.types import Generation, SamplingParams

PROMPT = list(range(40, 75))
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


def expected_logprobs(reference, prompt: list[int], generation: Generation, **options):
    """Log-probs of the sampled ids by a plain forward pass."""
    ids = generation.output_ids.tolist()
    rows = reference(prompt + ids, **options)[len(prompt) - 1 : -1]
    return rows[np.arange(len(ids)), ids]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_sampled_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(
    client: EngineClient, reference, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=30, ignore_eos=True)
    generation = await client.generate(PROMPT, params)
    assert len(generation.output_ids) == 30
    assert generation.finish_reason == "length"
    expected = expected_logprobs(reference, PROMPT, generation, temperature=temperature)
    np.testing.assert_allclose(generation.output_logprobs, expected, atol=1e-3)


async def test_truncation_does_not_renormalise_logprobs(client: EngineClient, reference) -> None:
    params = SamplingParams(top_k=3, top_p=0.9, max_new_tokens=20, ignore_eos=True)
    generation = await client.generate(PROMPT, params)
    expected = expected_logprobs(reference, PROMPT, generation)
    np.testing.assert_allclose(generation.output_logprobs, expected, atol=1e-3)
    rows = reference(PROMPT + generation.output_ids.tolist())[len(PROMPT) - 1 : -1]
    ranks = (rows > np.array(expected)[:, None] + 1e-4).sum(axis=1)
    assert (ranks < 3).all()


async def test_greedy_takes_the_most_probable_token(client: EngineClient, reference) -> None:
    generation = await client.generate(PROMPT, GREEDY)
    rows = reference(PROMPT + generation.output_ids.tolist())[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(generation.output_logprobs, rows.max(axis=1), atol=1e-3)


async def test_streaming_gives_what_waiting_gives(client: EngineClient) -> None:
    whole = await client.generate(PROMPT, GREEDY)
    chunks = [chunk async for chunk in client.stream(PROMPT, GREEDY)]
    assert [chunk.final is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    final = chunks[-1].final
    assert final is not None
    streamed = [token for chunk in chunks for token in chunk.new_ids]
    assert streamed == final.output_ids.tolist() == whole.output_ids.tolist()
    logprobs = [value for chunk in chunks for value in chunk.new_logprobs]
    np.testing.assert_allclose(logprobs, whole.output_logprobs, atol=1e-4)
    assert final.text == whole.text
    assert final.weight_spans == whole.weight_spans


async def test_stop_token_stays_in_the_ids_and_leaves_the_text(
    client: EngineClient, tokenizer
) -> None:
    ids = (await client.generate(PROMPT, GREEDY)).output_ids.tolist()
    stop = ids[6]
    end = ids.index(stop)
    params = SamplingParams(temperature=0, max_new_tokens=24, stop_token_ids=(stop,))
    generation = await client.generate(PROMPT, params)
    assert generation.output_ids.tolist() == ids[: end + 1]
    assert (generation.finish_reason, generation.matched) == ("stop", stop)
    assert generation.text == tokenizer.decode(ids[:end], skip_special_tokens=True)


async def test_stop_string_ends_the_response_and_leaves_the_text(client: EngineClient) -> None:
    text = (await client.generate(PROMPT, GREEDY)).text
    stop = next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].isascii())
    params = SamplingParams(temperature=0, max_new_tokens=24, stop=(stop,))
    generation = await client.generate(PROMPT, params)
    assert (generation.finish_reason, generation.matched) == ("stop", stop)
    assert generation.text == text[: text.index(stop)]


async def test_requests_of_many_lengths_at_once_are_each_right(
    client: EngineClient, reference
) -> None:
    async def one(number: int) -> float:
        prompt = [(number * 11 + j) % 200 for j in range(1 + 9 * number)]
        params = SamplingParams(max_new_tokens=4 + 3 * number, ignore_eos=True)
        generation = await client.generate(prompt, params)
        gap = generation.output_logprobs - expected_logprobs(reference, prompt, generation)
        return float(np.abs(gap).max())

    gaps = await asyncio.gather(*map(one, range(14)))
    assert max(gaps) < 1e-3


async def test_equal_prompts_at_once_are_sampled_independently(client: EngineClient) -> None:
    params = SamplingParams(temperature=1.5, max_new_tokens=16, ignore_eos=True)
    generations = await asyncio.gather(*(client.generate(PROMPT, params) for _ in range(5)))
    assert len({tuple(generation.output_ids.tolist()) for generation in generations}) == 5


async def test_a_late_request_starts_while_others_decode(client: EngineClient) -> None:
    long = SamplingParams(max_new_tokens=400, ignore_eos=True)
    running = asyncio.create_task(client.generate(PROMPT, long))
    async with aclosing(client.stream(PROMPT[:20], long)) as stream:
        await anext(stream)
        short = SamplingParams(max_new_tokens=2, ignore_eos=True)
        await client.generate(PROMPT[:10], short)
        assert not running.done()
    assert len((await running).output_ids) == 400


async def test_abort_ends_a_stream_with_what_was_sampled(client: EngineClient) -> None:
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    seen = 0
    final = None
    async for chunk in client.stream(PROMPT, params, request_id="contract-abort"):
        seen += len(chunk.new_ids)
        final = chunk.final
        if seen >= 3 and final is None:
            await client.abort("contract-abort")
    assert final is not None
    assert final.finish_reason == "abort"
    assert 3 <= len(final.output_ids) == seen < 400
    await client.abort("contract-never-heard-of")


async def test_refusals_are_told_apart_from_failures(client: EngineClient, vocab_size: int) -> None:
    length = (await client.model_info()).context_length
    assert length is not None
    too_long = [5] * (length + 20)
    with pytest.raises(EngineRejected, match="longer than") as refused:
        await client.generate(too_long, GREEDY)
    assert refused.value.status == 400
    with pytest.raises(EngineRejected, match="longer than"):
        async for _ in client.stream(too_long, GREEDY):
            pass
    with pytest.raises(EngineRejected, match="exceeds the model's maximum context length"):
        await client.generate(PROMPT, SamplingParams(max_new_tokens=length))
    with pytest.raises(EngineRejected, match="temperature"):
        await client.generate(PROMPT, SamplingParams(temperature=-1))
    for ids in ([vocab_size], [-1], []):
        with pytest.raises(ValueError, match="input id"):
            await client.generate(ids, GREEDY)
    assert len((await client.generate(PROMPT, GREEDY)).output_ids) == 24


@pytest.mark.parametrize("number", [1, 12])
async def test_several_continuations_by_one_request(
    client: EngineClient, reference, number: int
) -> None:
    bias = tuple((token, -100.0) for token in range(100))
    params = SamplingParams(max_new_tokens=1, logit_bias=bias)
    found = await client.draw(PROMPT, params, number)
    assert [len(one.output_ids) for one in found] == [1] * number
    tokens = [int(one.output_ids[0]) for one in found]
    assert min(tokens) >= 100, "the bias holds for each"
    assert number == 1 or len(set(tokens)) > 1
    row = reference(PROMPT)[-1]
    left = np.log(np.exp(row[100:]).sum())
    for token, one in zip(tokens, found, strict=True):
        assert one.output_logprobs[0] == pytest.approx(row[token] - left, abs=1e-3)
    with pytest.raises(ValueError, match="number must be"):
        await client.draw(PROMPT, params, 65)
