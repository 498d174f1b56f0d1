"""What an engine says of itself."""

from __future__ import annotations

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import SamplingParams


async def test_nothing_speaks_against_this_engine(client: EngineClient) -> None:
    info = await client.server_info()
    assert info.kind in ("sglang", "embedded")
    assert info.problems == ()
    assert info.reports_spans


async def test_the_vocabulary_is_the_models(client: EngineClient, vocab_size: int) -> None:
    info = await client.server_info()
    stated = (await client.model_info()).vocab_size
    assert stated in (None, vocab_size)
    if info.checks_vocabulary:
        assert await client.served_vocab_size() == vocab_size
    else:
        assert stated == vocab_size


async def test_a_paused_engine_still_says_what_it_serves(client: EngineClient) -> None:
    before = await client.model_info(), await client.server_info()
    await client.pause("retract")
    try:
        assert (await client.model_info(), await client.server_info()) == before
    finally:
        await client.resume()


async def test_a_prompt_with_the_last_id_is_answered(client: EngineClient, vocab_size: int) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    assert len((await client.generate([5, vocab_size - 1], params)).output_ids) == 2
