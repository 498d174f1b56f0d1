"""Pretrained models, where `./run.sh models` has put them: exact beyond their windows."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.real_models.__main__ import MODELS, ROOT
from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from rollout_bridge.rendering.rendering import Rendering
from tests.rollout_bridge.embedded.test_families import gap, plain_logprobs

BEYOND = 600
"""Tokens of a prompt; Gemma 3's windows are 512."""


@pytest.mark.parametrize("name", MODELS)
async def test_a_real_model_is_served_exactly(name: str) -> None:
    folder = ROOT / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip("get it with ./run.sh models")
    rendering = Rendering.load(str(folder), RendererConfig(name="default"))
    text = "".join(f"{number} times {number} is {number**2}. " for number in range(100))
    ids = rendering.prompt_ids([{"role": "user", "content": text}]).tolist()
    ids = ids[:BEYOND]
    engine = Engine(EmbeddedEngineConfig(model=str(folder), context_length=1024, seed=0))
    assert engine.stop_token_ids == frozenset(rendering.stop_token_ids)
    engine.start()
    said = EngineRequest(input_ids=ids, sampling=Sampling(max_new_tokens=16, temperature=0.7))
    try:
        engine.submit(said)
        await asyncio.wait_for(said.context.wait(), 100)
        scored = EngineRequest(
            input_ids=said.sequence, score_from=1, sampling=Sampling(max_new_tokens=0)
        )
        engine.submit(scored)
        await asyncio.wait_for(scored.context.wait(), 100)
    finally:
        await asyncio.to_thread(engine.stop)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = plain_logprobs(model, said.sequence)
    assert len(said.output_ids) > 4
    assert gap(scored.input_logprobs, expected) < 1e-4
    # Sampled at 0.7: by the distribution that was sampled from.
    with torch.inference_mode():
        rows = model(torch.tensor([said.sequence])).logits[0, len(ids) - 1 : -1]
    cooled = (rows.double() / 0.7).log_softmax(-1)
    own = cooled.gather(1, torch.tensor(said.output_ids)[:, None])[:, 0]
    assert gap(said.output_logprobs, own) < 1e-4
