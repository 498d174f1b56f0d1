"""Layers computed again backward give the gradients of those that kept everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.rollout_bridge.model_families import FAMILIES, VOCAB, WINDOW, model_of
from tests.trainer.tiny import rows_of_ids
from trainer.config import LoraConfig
from trainer.model.lora import add_adapters
from trainer.model.policy import Policy

LENGTH = 2 * WINDOW + 5
EXACT = 1e-6


def policies(family: str, *, adapted: bool) -> tuple[Policy, Policy]:
    """Equal ones, the second of which computes layers again."""

    def make() -> Policy:
        model: Any = model_of(family)
        if adapted:
            model = add_adapters(model, LoraConfig(rank=2, alpha=8), seed=0)
        return Policy(model, dtype="float32", chunk_tokens=64)

    kept, again = make(), make()
    again.recompute_layers()
    torch.manual_seed(1)
    for one, other in zip(kept.trainable_parameters(), again.trainable_parameters(), strict=True):
        if adapted:
            torch.nn.init.normal_(one, std=0.1)
        with torch.no_grad():
            other.copy_(one)
    return kept, again


def gradients(policy: Policy) -> list[torch.Tensor | None]:
    found = policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT
    loss = found.sum() / found.numel()
    # As the trainer's probe does: the graph serves twice.
    torch.autograd.grad(loss, policy.trainable_parameters(), retain_graph=True, allow_unused=True)
    loss.backward()
    return [parameter.grad for parameter in policy.trainable_parameters()]


def counted(policy: Policy, calls: list[int]) -> None:
    """Count how often the last layer is computed."""
    layer: Any = policy.base_model.get_decoder().layers[-1].self_attn
    forward: Callable[..., Any] = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    layer.forward = run


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same(family: str, adapted: bool) -> None:
    kept, again = policies(family, adapted=adapted)
    for one, other in zip(gradients(kept), gradients(again), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(other, one, atol=EXACT, rtol=EXACT)


def test_a_layer_is_computed_again_for_gradients_alone() -> None:
    _, again = policies("Llama", adapted=True)
    calls: list[int] = []
    counted(again, calls)
    with torch.no_grad():
        again.token_logprobs(*rows_of_ids(VOCAB, LENGTH))
    assert len(calls) == 1
    again.token_logprobs(*rows_of_ids(VOCAB, LENGTH)).logprobs_BT.sum().backward()
    assert len(calls) == 3


def test_little_is_kept_for_the_backward_pass() -> None:
    sizes = []
    for policy in policies("Llama", adapted=True):
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.token_logprobs(*rows_of_ids(VOCAB, LENGTH))
        sizes.append(sum(kept.values()))
    assert sizes[1] < sizes[0] / 2
