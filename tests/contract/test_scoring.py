"""Log-probabilities of given tokens: the teacher's side of the contract."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams

PROMPT = [7, 30, 31, 90, 12, 55, 140, 9]


async def test_first_and_last_response_token_are_scored(client: EngineClient, reference) -> None:
    generation = await client.generate(
        PROMPT, SamplingParams(temperature=0.6, max_new_tokens=12, ignore_eos=True)
    )
    response = generation.output_ids.tolist()
    scores = await client.score(PROMPT + response, len(PROMPT))
    rows = reference(PROMPT + response)
    assert len(scores) == len(response)
    assert scores[0] == pytest.approx(rows[len(PROMPT) - 1, response[0]], abs=1e-3)
    assert scores[-1] == pytest.approx(rows[-2, response[-1]], abs=1e-3)
    expected = rows[len(PROMPT) - 1 : -1][np.arange(len(response)), response]
    np.testing.assert_allclose(scores, expected, atol=1e-3)


@pytest.mark.parametrize("start", [1, 2, 17, 39])
async def test_every_start_scores_to_the_end(client: EngineClient, reference, start: int) -> None:
    ids = [(7 * i) % 190 for i in range(40)]
    expected = reference(ids)[np.arange(start - 1, 39), ids[start:]]
    np.testing.assert_allclose(await client.score(ids, start), expected, atol=1e-3)


async def test_the_first_and_the_last_id_of_the_vocabulary_are_scored(
    client: EngineClient, reference, vocab_size: int
) -> None:
    ids = [5, vocab_size - 1, 0, 8, vocab_size - 1]
    expected = reference(ids)[np.arange(4), ids[1:]]
    np.testing.assert_allclose(await client.score(ids, 1), expected, atol=1e-3)
    np.testing.assert_allclose(await client.score(ids, 2), expected[1:], atol=1e-3)


async def test_as_many_top_logprobs_as_objectives_ask_for(client: EngineClient, reference) -> None:
    generation = await client.generate(PROMPT, SamplingParams(max_new_tokens=9, ignore_eos=True))
    ids = PROMPT + generation.output_ids.tolist()
    scored = await client.score_with_topk(ids, len(PROMPT), 64)
    rows = reference(ids)[len(PROMPT) - 1 : -1]
    assert scored.topk_ids is not None
    assert scored.topk_ids.shape == (9, 64)
    assert (np.diff(scored.topk_logprobs, axis=1) <= 0).all()
    assert all(len(set(row)) == 64 for row in scored.topk_ids.tolist())
    np.testing.assert_allclose(
        np.take_along_axis(rows, scored.topk_ids, axis=1), scored.topk_logprobs, atol=1e-3
    )
    np.testing.assert_allclose(scored.logprobs, await client.score(ids, len(PROMPT)), atol=1e-5)


@pytest.mark.parametrize("length", [1, 16, 40])
async def test_given_tokens_are_scored_at_each_position(
    client: EngineClient, reference, vocab_size: int, length: int
) -> None:
    ids = [(7 * i) % 190 for i in range(len(PROMPT) + length)]
    generator = np.random.default_rng(length)
    asked = generator.integers(0, vocab_size, size=(length, 6)).astype(np.int32)
    asked[:, 1] = asked[:, 0]  # drawn twice
    found = await client.score_tokens(ids, len(PROMPT), asked)
    rows = reference(ids)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(found, np.take_along_axis(rows, asked, axis=1), atol=1e-3)
    with pytest.raises(ValueError, match="positions"):
        await client.score_tokens(ids, len(PROMPT), asked[1:])


async def test_scoring_needs_context_and_a_token(client: EngineClient) -> None:
    for start in (0, -1, len(PROMPT)):
        with pytest.raises(ValueError, match="start"):
            await client.score(PROMPT, start)


async def test_top_logprobs_are_the_most_probable(client: EngineClient, reference) -> None:
    scored = await client.score_with_topk(PROMPT, 3, k=4)
    ids, logprobs = scored.topk_ids, scored.topk_logprobs
    assert ids is not None
    assert logprobs is not None
    rows = reference(PROMPT)[2:-1]
    assert ids.shape == logprobs.shape == (len(PROMPT) - 3, 4)
    np.testing.assert_allclose(logprobs, -np.sort(-rows, axis=1)[:, :4], atol=1e-3)
    np.testing.assert_allclose(np.take_along_axis(rows, ids, axis=1), logprobs, atol=1e-3)


async def test_scores_at_once_with_shared_prefixes_are_each_right(
    client: EngineClient, reference
) -> None:
    shared = [(3 * i) % 200 for i in range(60)]

    async def one(number: int) -> float:
        ids = shared[: 20 + 3 * number] + [(number + 5 * j) % 180 for j in range(25)]
        start = 20 + 3 * number
        expected = reference(ids)[np.arange(start - 1, len(ids) - 1), ids[start:]]
        return float(np.abs(await client.score(ids, start) - expected).max())

    assert max(await asyncio.gather(*map(one, range(12)))) < 1e-3
