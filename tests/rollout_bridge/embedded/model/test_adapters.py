"""Adapters in the embedded engine: what is refused, and what they cost and share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout_bridge.embedded.errors import AdapterRejected, BadRequest
from rollout_bridge.embedded.model.adapters import AdapterLayers, read_adapter
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from tests.contract import tiny_model
from tests.rollout_bridge.embedded.test_engine import complete, started
from tests.rollout_bridge.model_families import model_of
from trainer.config import LoraConfig
from trainer.model.lora import add_adapters, save_adapter

ONE_TOKEN = Sampling(max_new_tokens=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory) -> list[Path]:
    return [
        saved(AutoModelForCausalLM.from_pretrained(model), str(model), folder, seed)
        for seed, folder in enumerate(tmp_path_factory.mktemp(name) for name in "ab")
    ]


def saved(base: Any, name: str, folder: Path, seed: int = 0, **options) -> Path:
    adapted = add_adapters(base, LoraConfig(rank=4, alpha=8, **options), seed)
    torch.manual_seed(seed)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(adapted, folder, name)
    return folder


def changed(source: Path, target: Path, **values) -> Path:
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return target


def renamed(source: Path, target: Path, old: str, new: str) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "adapter_model.safetensors")
    save_file(
        {name.replace(old, new): tensor for name, tensor in tensors.items()},
        target / "adapter_model.safetensors",
    )
    return target


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"base_model_name_or_path": "other/model"}, "it is an adapter of other/model, and this"),
        ({"r": 5}, "needs [5, 128] and [64, 5]: it was trained for another model"),
        ({"r": 0}, "r must be a positive number"),
        ({"peft_type": "IA3"}, "only adapters of peft_type LORA are served"),
        ({"use_dora": True}, "use_dora is set, which can only be served merged"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters is set, which can only"),
        ({"bias": "all"}, "bias is set, which can only be served merged"),
    ],
)
def test_another_kind_of_adapter_is_refused_in_one_line(model, adapters, tmp_path, values, said):
    refused(changed(adapters[0], tmp_path / "changed", **values), model, said)


def test_an_adapter_of_another_model_is_refused_in_one_line(model, adapters, tmp_path):
    missing = renamed(adapters[0], tmp_path / "missing", "layers.1.", "layers.7.")
    refused(missing, model, "it adapts model.layers.7.", "which is not a linear layer of")
    norm = renamed(adapters[0], tmp_path / "norm", "q_proj", "q_norm")
    refused(norm, model, "it adapts model.layers.0.self_attn.q_norm, which is not a linear layer")
    odd = renamed(adapters[0], tmp_path / "odd", "lora_A", "lora_embedding_A")
    refused(odd, model, "is not part of an adapter of linear layers")
    refused(tmp_path / "none", model, "adapter_config.json: cannot be read")


def refused(folder: Path, base: Path, *said: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(AdapterRejected) as caught:
        read_adapter("name", str(folder), network, str(base))
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_in_experts_is_refused(tmp_path):
    """They are one parameter in this family; its routers are called with tokens of all rows."""
    family = next(name for name in ("Qwen 3, experts", "Mixtral"))
    base = model_of(family)
    folder = saved(base, "base", tmp_path, target_modules="all-linear")
    with pytest.raises(AdapterRejected, match="target_parameters is set, which can only be"):
        read_adapter("name", str(folder), model_of(family), "base")


def test_a_layer_that_sees_rows_in_another_shape_is_refused(model, adapters):
    network = AutoModelForCausalLM.from_pretrained(model)
    layer = network.model.layers[0].mlp
    whole = layer.forward
    layer.forward = lambda x: whole(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    adapter = read_adapter("name", str(adapters[0]), network, str(model))
    with pytest.raises(AdapterRejected, match=r"layers.0.mlp.* does not see the rows of a batch"):
        AdapterLayers(network, torch.device("cpu")).fit(adapter)


async def test_a_name_is_for_one_folder_for_ever(model, adapters):
    one, other = map(str, adapters)
    async with started(model) as engine:
        await engine.load_adapter("a", one)
        with pytest.raises(AdapterRejected, match="'a' is already loaded"):
            await engine.load_adapter("a", one)
        await engine.unload_adapter("a")
        with pytest.raises(AdapterRejected, match="'a' was the adapter in"):
            await engine.load_adapter("a", other)
        with pytest.raises(BadRequest, match="'a' is not loaded"):
            engine.adapter("a")
        await engine.load_adapter("a", one)
        assert engine.adapters == {"a": one}


async def test_prefixes_are_shared_within_an_adapter_only(model, adapters):
    prompt = list(range(40, 90))
    async with started(model) as engine:
        for name, path in zip("ab", adapters, strict=True):
            await engine.load_adapter(name, str(path))
        cached = []
        for name in (None, "a", "b", "a", None, "b"):
            request = EngineRequest(
                input_ids=prompt, sampling=ONE_TOKEN, adapter=engine.adapter(name)
            )
            await complete(engine, request)
            cached.append(request.cached_tokens)
        assert cached == [0, 0, 0, 48, 48, 48]


async def test_long_prompts_and_scores_are_computed_with_the_adapter(model, adapters):
    """In pieces, beside others of the base."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 360, (400,), generator=generator).tolist()
    found = {}
    for cost in (1024, 2**19):
        async with started(model, max_step_cost=cost) as engine:
            await engine.load_adapter("a", str(adapters[0]))
            scored, plain, sampled = (
                EngineRequest(
                    input_ids=prompt, sampling=Sampling(max_new_tokens=0), score_from=200
                ),
                EngineRequest(
                    input_ids=prompt, sampling=Sampling(max_new_tokens=0), score_from=200
                ),
                EngineRequest(
                    input_ids=prompt, sampling=Sampling(max_new_tokens=4, temperature=0.0)
                ),
            )
            scored.adapter = sampled.adapter = engine.adapter("a")
            await complete(engine, scored, plain, sampled)
            found[cost] = scored.input_logprobs, plain.input_logprobs, sampled.output_logprobs
    for pieces, whole in zip(found[1024], found[2**19], strict=True):
        torch.testing.assert_close(torch.tensor(pieces), torch.tensor(whole), atol=2e-5, rtol=1e-5)
    scored, plain, _ = found[1024]
    assert (torch.tensor(scored) - torch.tensor(plain)).abs().max() > 0.01


def test_rows_without_an_adapter_add_nothing(model, adapters):
    network = AutoModelForCausalLM.from_pretrained(model)
    layers = AdapterLayers(network, torch.device("cpu"))
    adapter = read_adapter("name", str(adapters[0]), network, str(model))
    ids = torch.arange(30).view(3, 10)
    with torch.inference_mode():
        before = network(ids).logits
        layers.fit(adapter)
        layers.use(layers.plan([None, None, None]))
        assert layers.plan([None, None, None]).groups == ()
        assert torch.equal(network(ids).logits, before)
        layers.use(layers.plan([None, adapter, None]))
        mixed = network(ids).logits
        torch.testing.assert_close(mixed[[0, 2]], before[[0, 2]], atol=1e-6, rtol=1e-6)
        assert (mixed[1] - before[1]).abs().max() > 0.1
        layers.use(layers.plan([adapter] * 3))
        torch.testing.assert_close(network(ids).logits[1], mixed[1], atol=1e-5, rtol=1e-5)
