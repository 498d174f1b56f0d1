"""A base held in bfloat16 computes what one computes that holds the same values in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.rollout_bridge.model_families import FAMILIES, VOCAB, WINDOW, model_of
from tests.trainer.tiny import rows_of_ids
from trainer.config import LoraConfig
from trainer.model.frozen_weights import FrozenEmbedding, FrozenLinear
from trainer.model.lora import adapter_state, load_adapter, merged_state, save_adapter
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.token_states import TokenRequest
from trainer.publishing.merged import save_full, write_merged

# Of log-probs in float32; rounding the matrices anew would show as 1e-2.
EXACT = 1e-5
LENGTH = 2 * WINDOW + 5


def stored_in_bfloat16(family: str, folder: Path) -> str:
    model_of(family).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def load(path: str, base_dtype: str, *, recompute: bool = False) -> Policy:
    lora = LoraConfig(rank=2, alpha=8)
    options = {"base_dtype": base_dtype, "recompute": recompute, "lora": lora}
    return Policy.load(path, device="cpu", dtype="float32", chunk_tokens=64, **options)


def with_random_adapters(policy: Policy) -> Policy:
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def gradients(policy: Policy) -> tuple[torch.Tensor, list[torch.Tensor]]:
    found = policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
    return found.detach(), list(torch.autograd.grad(found.sum(), policy.trainable_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_in_bfloat16_trains_as_its_values_in_float32(family: str, tmp_path: Path) -> None:
    path = stored_in_bfloat16(family, tmp_path / "model")
    exact = with_random_adapters(load(path, "float32"))
    held = with_random_adapters(load(path, "bfloat16"))
    (logprobs, expected), (found, actual) = gradients(exact), gradients(held)
    torch.testing.assert_close(found, logprobs, atol=EXACT, rtol=0)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    start = [
        WithoutAdapters(one).token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
        for one in (exact, held)
    ]
    torch.testing.assert_close(start[1], start[0], atol=EXACT, rtol=0)
    for name, tensor in merged_state(exact.base_model).items():
        torch.testing.assert_close(
            merged_state(held.base_model)[name].float(), tensor, atol=0, rtol=0
        )


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "Phi"])
def test_matrices_are_held_in_bfloat16_and_the_rest_in_float32(family: str, tmp_path: Path) -> None:
    base = load(stored_in_bfloat16(family, tmp_path / "model"), "bfloat16").base_model
    assert isinstance(base.get_input_embeddings(), FrozenEmbedding)
    assert isinstance(base.get_output_embeddings(), FrozenLinear)
    for name, parameter in base.named_parameters():
        is_held = parameter.dim() == 2 and "lora_" not in name
        assert parameter.dtype == (torch.bfloat16 if is_held else torch.float32), name
        assert parameter.requires_grad == ("lora_" in name)
    kinds = {type(one) for one in base.modules() if isinstance(one, nn.Linear | nn.Embedding)}
    assert kinds <= {FrozenLinear, FrozenEmbedding, nn.Linear}


def test_a_backward_pass_keeps_no_matrix_in_float32(tmp_path: Path) -> None:
    policy = load(stored_in_bfloat16("Llama", tmp_path / "model"), "bfloat16")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH))
    matrices = {
        one.weight.shape for one in policy.base_model.modules() if isinstance(one, FrozenLinear)
    }
    matrices |= {torch.Size(reversed(shape)) for shape in matrices}
    large = [one for one in kept if one.shape in matrices and one.numel() >= 32 * 32]
    assert large
    assert all(one.dtype == torch.bfloat16 for one in large)


def test_tokens_are_drawn_alike(tmp_path: Path) -> None:
    path = stored_in_bfloat16("Gemma 2", tmp_path / "model")
    drawn = [
        load(path, held).token_logprobs(
            *rows_of_ids(VOCAB, LENGTH),
            request=TokenRequest(draw=5, generator=torch.Generator().manual_seed(3)),
        )
        for held in ("float32", "bfloat16")
    ]
    assert torch.equal(drawn[0].drawn_ids_BTK, drawn[1].drawn_ids_BTK)
    torch.testing.assert_close(drawn[0].drawn_BTK, drawn[1].drawn_BTK, atol=EXACT, rtol=0)


def test_what_is_published_is_exact_and_says_float32(tmp_path: Path) -> None:
    path = stored_in_bfloat16("Gemma 3", tmp_path / "model")
    policy = with_random_adapters(load(path, "bfloat16"))
    (tmp_path / "saved").mkdir()
    save_full(policy, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    plain = Policy.load(
        str(tmp_path / "saved"), device="cpu", dtype="float32", chunk_tokens=64
    ).freeze()
    with torch.no_grad():
        served = plain.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
        own = policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
    torch.testing.assert_close(served, own, atol=EXACT, rtol=0)


def test_adapters_of_a_checkpoint_are_loaded_in_float32(tmp_path: Path) -> None:
    path = stored_in_bfloat16("Llama", tmp_path / "model")
    written = with_random_adapters(load(path, "bfloat16"))
    read = load(path, "bfloat16")
    save_adapter(written.model, tmp_path, path)
    load_adapter(read.model, tmp_path)
    for name, tensor in adapter_state(written.base_model).items():
        assert torch.equal(adapter_state(read.base_model)[name], tensor), name


def test_autocast_computes_in_bfloat16(tmp_path: Path) -> None:
    path = stored_in_bfloat16("Llama", tmp_path / "model")
    layer = load(path, "bfloat16").base_model.get_output_embeddings()
    states = torch.randn(3, layer.in_features)
    assert layer(states).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(states).dtype == torch.bfloat16


def test_weights_merged_from_disk_are_those_that_were_trained(tmp_path: Path) -> None:
    """Also where the run rounds a start that is stored in float32."""
    path = stored_in_bfloat16("Llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(1e-3 * torch.rand_like(parameter))
    model.save_pretrained(path)
    policy = with_random_adapters(load(path, "bfloat16"))
    (tmp_path / "adapter").mkdir()
    save_adapter(policy.model, tmp_path / "adapter", path)
    write_merged(path, tmp_path / "adapter", tmp_path / "merged")
    plain = Policy.load(str(tmp_path / "merged"), device="cpu", dtype="float32", chunk_tokens=64)
    with torch.no_grad():
        exported = plain.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
        trained = policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
    torch.testing.assert_close(exported, trained, atol=EXACT, rtol=0)
