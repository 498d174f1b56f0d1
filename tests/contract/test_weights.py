"""Weight updates, versions and pauses."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.types import Generation, PauseMode, SamplingParams, WeightSpan
from tests.contract.conftest import updated

PROMPT = list(range(60, 85))
LONG = SamplingParams(max_new_tokens=300, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


async def generate_across(client: EngineClient, mode: str, meanwhile) -> Generation:
    """A generation that is paused after some tokens, while `meanwhile` happens."""
    final = None
    paused = False
    async for chunk in client.stream(PROMPT, LONG):
        final = chunk.final
        if not paused and final is None:
            paused = True
            await client.pause(mode)
            await meanwhile()
            await client.resume()
    assert final is not None
    return final


def gaps(reference, generation: Generation, span: slice, weights: str) -> np.ndarray:
    """Distance of recorded log-probs from a forward pass with one set of weights."""
    ids = generation.output_ids.tolist()
    rows = reference(PROMPT + ids, weights=weights)[len(PROMPT) - 1 : -1]
    expected = rows[np.arange(len(ids)), ids]
    return np.abs(generation.output_logprobs - expected)[span]


async def test_engine_says_what_it_serves(client: EngineClient) -> None:
    await client._http.request("GET", "/health", None, timeout_s=client.config.probe_timeout_s)
    info = await client.model_info()
    generation = await client.generate(PROMPT, SHORT)
    assert generation.weight_version == info.weight_version
    assert generation.weight_spans == (WeightSpan(version=info.weight_version, start=0, end=8),)
    assert generation.prompt_tokens == len(PROMPT)


async def test_update_changes_weights_and_label(
    client: EngineClient, reference, other_weights: str
) -> None:
    ids = [*PROMPT, 3, 4, 5]
    served = reference(ids)[np.arange(24, 27), ids[25:]]
    other = reference(ids, weights="other")[np.arange(24, 27), ids[25:]]
    np.testing.assert_allclose(await client.score(ids, 25), served, atol=1e-3)
    await updated(client, other_weights, "contract-1")
    assert (await client.model_info()).weight_version == "contract-1"
    np.testing.assert_allclose(await client.score(ids, 25), other, atol=1e-3)
    generation = await client.generate(PROMPT, SHORT)
    assert generation.weight_version == "contract-1"
    assert gaps(reference, generation, slice(None), "other").max() < 1e-3


async def test_refused_update_changes_nothing(
    client: EngineClient, reference, other_weights: str
) -> None:
    before = await client.model_info()
    with pytest.raises(EngineRejected):
        await client.update_weights(other_weights + "-no-such-folder", "contract-2")
    assert (await client.model_info()).weight_version == before.weight_version
    generation = await client.generate(PROMPT, SHORT)
    assert gaps(reference, generation, slice(None), "served").max() < 1e-3


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_requests_wait_during_a_pause(client: EngineClient, mode: PauseMode) -> None:
    await client.pause(mode)
    try:
        waiting = asyncio.create_task(client.generate(PROMPT, SHORT))
        scoring = asyncio.create_task(client.score(PROMPT, 5))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert not scoring.done()
    finally:
        await client.resume()
    assert len((await waiting).output_ids) == 8
    assert len(await scoring) == len(PROMPT) - 5


async def test_pausing_twice_and_resuming_twice_is_as_once(client: EngineClient) -> None:
    await client.pause("retract")
    await client.pause("retract")
    await client.resume()
    await client.resume()
    assert len((await client.generate(PROMPT, SHORT)).output_ids) == 8


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_without_an_update_leaves_no_seam(
    client: EngineClient, reference, mode: PauseMode
) -> None:
    before = (await client.model_info()).weight_version

    async def nothing() -> None:
        pass

    generation = await generate_across(client, mode, nothing)
    assert generation.weight_spans == (WeightSpan(version=before, start=0, end=300),)
    assert gaps(reference, generation, slice(None), "served").max() < 1e-3


async def test_retracted_response_spans_versions_each_with_its_own_weights(
    client: EngineClient, reference, other_weights: str
) -> None:
    before = (await client.model_info()).weight_version

    async def update() -> None:
        await client.update_weights(other_weights, "contract-3")

    generation = await generate_across(client, "retract", update)
    assert generation.finish_reason == "length"
    assert generation.weight_spans is not None
    assert [span.version for span in generation.weight_spans] == [before, "contract-3"]
    cut = generation.weight_spans[0].end
    assert 0 < cut < 300
    assert gaps(reference, generation, slice(0, cut), "served").max() < 1e-3
    assert gaps(reference, generation, slice(cut, None), "other").max() < 1e-3


async def test_in_place_keeps_going_and_says_so(client: EngineClient, other_weights: str) -> None:
    before = (await client.model_info()).weight_version

    async def update() -> None:
        await client.update_weights(other_weights, "contract-4", flush_cache=False)

    generation = await generate_across(client, "in_place", update)
    assert generation.weight_spans is not None
    assert [span.version for span in generation.weight_spans] == [before, "contract-4"]
    assert len(generation.output_ids) == 300


async def test_pause_with_abort_ends_what_runs(client: EngineClient) -> None:
    async def nothing() -> None:
        pass

    generation = await generate_across(client, "abort", nothing)
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.output_ids) < 300
    assert len((await client.generate(PROMPT, SHORT)).output_ids) == 8


async def test_flush_cache_keeps_answers_right(client: EngineClient, reference) -> None:
    await client.generate(PROMPT, SHORT)
    await client.flush_cache()
    generation = await client.generate(PROMPT, SHORT)
    assert gaps(reference, generation, slice(None), "served").max() < 1e-3
