"""Each family through the engine and the trainer, equal to transformers' own forward pass.

Prompts go beyond the windows of those families that have some.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import UnsupportedModel
from rollout_bridge.embedded.model import loading
from rollout_bridge.embedded.model.masks import attention_windows
from rollout_bridge.embedded.model.runner import ModelRunner
from rollout_bridge.embedded.model.self_check import check_cached_forward
from rollout_bridge.embedded.model.supported import context_limit
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from tests.contract import tiny_model
from tests.rollout_bridge.model_families import FAMILIES, VOCAB, WINDOW, model_of, save_model
from trainer.config import LoraConfig
from trainer.model.lora import add_adapters, merged_state
from trainer.model.policy import Policy

EXACT = 1e-4
LENGTHS = (3, 2 * WINDOW + 5, WINDOW - 1, 3 * WINDOW)
NEW = 12


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tiny_model.build(tmp_path_factory.mktemp("tokenizer"), 0)
    return [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def plain_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs [T-1] of ids[1:] by transformers alone."""
    rows = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def gap(found: Any, expected: torch.Tensor) -> float:
    return float((torch.as_tensor(found, dtype=torch.float64) - expected).abs().max())


async def sampled(engine: Engine, sequences: list[list[int]], **more: Any) -> list[EngineRequest]:
    sampling = Sampling(max_new_tokens=more.pop("new", NEW))
    requests = [EngineRequest(input_ids=ids, sampling=sampling, **more) for ids in sequences]
    for request in requests:
        engine.submit(request)
    for request in requests:
        await asyncio.wait_for(request.context.wait(), 30)
        assert request.error is None
    return requests


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_engine_computes_what_transformers_does(
    family: str, tmp_path: Path, tokenizer_files: list[Path]
) -> None:
    folder = save_model(family, tmp_path)
    for file in tokenizer_files:
        (folder / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = Engine(EmbeddedEngineConfig(model=str(folder), context_length=256, seed=0))
    engine.start()
    try:
        together = await sampled(engine, prompts())
        # The longest again, with more behind it: its prefix is known.
        longer = [*together[-1].sequence, *prompts()[1]]
        (again,) = await sampled(engine, [longer])
        assert again.cached_tokens >= len(together[-1].sequence) - 17
        scored = await sampled(engine, [longer, *prompts()], new=0, score_from=1)
    finally:
        await asyncio.to_thread(engine.stop)
    for request in (*together, again):
        expected = plain_logprobs(model, request.sequence)[-len(request.output_ids) :]
        assert gap(request.output_logprobs, expected) < EXACT
    for request in scored:
        assert gap(request.input_logprobs, plain_logprobs(model, request.input_ids)) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_computes_what_transformers_does(family: str) -> None:
    plain, model = model_of(family), model_of(family)
    adapted = add_adapters(model, LoraConfig(rank=2, alpha=8), seed=0)
    policy = Policy(adapted, dtype="float32", chunk_tokens=64)
    sequences = prompts()
    padded = [ids + [0] * (max(LENGTHS) - len(ids)) for ids in sequences]
    mask_BT = torch.tensor([[0.0] + [1.0] * (n - 1) + [0.0] * (max(LENGTHS) - n) for n in LENGTHS])
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    merged = model_of(family)
    merged.load_state_dict(merged_state(policy.base_model))
    found: dict[bool, torch.Tensor] = {}
    with torch.no_grad():
        found[True] = policy.token_logprobs(torch.tensor(padded), mask_BT).logprobs_BT
        with adapted.disable_adapter():  # type: ignore[operator]
            found[False] = policy.token_logprobs(torch.tensor(padded), mask_BT).logprobs_BT
    for with_adapters, reference in ((True, merged), (False, plain)):
        for row, ids in enumerate(sequences):
            expected = plain_logprobs(reference, ids)
            assert gap(found[with_adapters][row, 1 : len(ids)], expected) < EXACT
    assert gap(found[True], found[False].double()) > 0.01


def test_families_with_windows_see_them() -> None:
    seen = {name: attention_windows(model_of(name).config) for name in FAMILIES}
    windows = {name for name, kinds in seen.items() if WINDOW in kinds.values()}
    assert windows >= {"Qwen 2, windows", "Qwen 3, windows", "Gemma 2", "Gemma 3", "Phi-3"}
    assert windows >= {"Mistral, a window", "gpt-oss", "Olmo 3"}
    assert {"Llama", "Qwen 2.5", "Qwen 3", "Mistral", "SmolLM3"}.isdisjoint(windows)


def test_a_window_that_a_model_does_not_keep_to_is_found_at_start(monkeypatch) -> None:
    model = model_of("Mistral, a window")
    runner = ModelRunner(model, 256)
    shape = runner.cache_shape()
    check_cached_forward(runner, shape)
    monkeypatch.setattr(
        "rollout_bridge.embedded.model.masks.attention_windows",
        lambda config: {"full_attention": None},
    )
    with pytest.raises(UnsupportedModel, match=r"mistral: log-probs .* differ"):
        check_cached_forward(runner, shape)


def test_the_context_ends_where_positions_change_their_meaning() -> None:
    assert context_limit({"max_position_embeddings": 4096}) is None
    assert context_limit({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 9}) is None
    long = {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
    }
    assert context_limit(long) == 64
    config = Phi3Config(
        **long,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        pad_token_id=0,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    asked = EmbeddedEngineConfig(model="phi")
    assert loading.context_length(model, asked) == 64
    with pytest.raises(
        UnsupportedModel, match=r"phi3: beyond 64 tokens, .* or serve it from SGLang"
    ):
        loading.context_length(model, asked.model_copy(update={"context_length": 128}))
