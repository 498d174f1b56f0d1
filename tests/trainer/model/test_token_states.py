"""What rows begin with is computed once, and nothing else changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rollout_bridge.model_families import FAMILIES, VOCAB, WINDOW, save_model
from tests.trainer.model.test_frozen_weights import with_random_adapters
from trainer.config import LoraConfig
from trainer.model.policy import Policy, WithoutAdapters
from trainer.model.token_states import shared_length

COMMON = 64 + WINDOW
"""Tokens that the rows begin with: more than a window, and enough to be worth it."""


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of unlike lengths that begin alike, and which of their tokens are wanted."""
    torch.manual_seed(2)
    ids_BT = torch.randint(1, VOCAB, (3, COMMON + 12))
    ids_BT[:, :COMMON] = ids_BT[0, :COMMON]
    mask_BT = torch.zeros(ids_BT.shape)
    mask_BT[0, COMMON + 3 :] = 1
    mask_BT[1, COMMON + 1 : COMMON + 5] = 1
    mask_BT[2, COMMON + 8 : COMMON + 9] = 1
    ids_BT[2, COMMON + 9 :] = 0
    return ids_BT, mask_BT


def policy_of(path: Path, *, recompute: bool = False) -> Policy:
    """With random adapters."""
    lora = LoraConfig(rank=2, alpha=8)
    made = Policy.load(
        str(path), device="cpu", dtype="float32", chunk_tokens=64, lora=lora, recompute=recompute
    )
    return with_random_adapters(made)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_whole_rows(
    family: str, recompute: bool, tmp_path: Path
) -> None:
    policy = policy_of(save_model(family, tmp_path / "model"), recompute=recompute)
    assert policy.shares_prefixes
    ids_BT, mask_BT = rows()
    together = policy.token_logprobs(ids_BT, mask_BT).logprobs_BT
    # A row alone shares with nobody.
    each = [policy.token_logprobs(*row).logprobs_BT for row in single_rows()]
    torch.testing.assert_close(together, torch.cat(each), atol=1e-5, rtol=0)
    parameters = policy.trainable_parameters()
    found = torch.autograd.grad(together.sum(), parameters)
    expected = torch.autograd.grad(torch.cat(each).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    start = WithoutAdapters(policy)
    with torch.no_grad():
        torch.testing.assert_close(
            start.token_logprobs(ids_BT, mask_BT).logprobs_BT,
            torch.cat([start.token_logprobs(*row).logprobs_BT for row in single_rows()]),
            atol=1e-5,
            rtol=0,
        )


def single_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids_BT, mask_BT = rows()
    return list(zip(ids_BT.split(1), mask_BT.split(1), strict=True))


def test_what_is_shared_goes_through_the_layers_once(tmp_path: Path) -> None:
    policy = policy_of(save_model("Llama", tmp_path / "model"))
    seen: list[int] = []
    embedding = policy.base_model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].numel()))
    ids_BT, mask_BT = rows()
    policy.token_logprobs(ids_BT, mask_BT)
    assert seen == [COMMON, 3 * 11]


def test_how_much_is_shared() -> None:
    ids_BT, mask_BT = rows()
    assert shared_length(ids_BT, mask_BT) == COMMON
    assert shared_length(ids_BT[:1], mask_BT[:1]) == 0
    assert shared_length(ids_BT, torch.zeros(ids_BT.shape)) == 0
    # The state before the first wanted token is wanted.
    early_BT = mask_BT.clone()
    early_BT[0, 50] = 1
    assert shared_length(ids_BT, early_BT) == 49
    # Too little to be worth a second pass.
    early_BT[1, 20] = 1
    assert shared_length(ids_BT, early_BT) == 0
    ids_BT[1, 40] += 1
    assert shared_length(ids_BT, mask_BT) == 40
    other_BT = torch.arange(ids_BT.numel()).reshape(ids_BT.shape)
    assert shared_length(other_BT, mask_BT) == 0
