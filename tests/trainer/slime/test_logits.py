"""Log-probs out of logits against torch's own, whole and with the vocabulary in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.trainer.slime.one_process import OneProcess
from trainer.slime.logits import LogitsRequest, logits_logprobs

T, V, K = 11, 17, 3


def request(places: Tensor, **changes) -> LogitsRequest:
    generator = torch.Generator().manual_seed(1)
    count = len(places)
    values = {
        "ids_N": torch.randint(0, V, (count,), generator=generator),
        "temperatures_N": torch.rand(count, generator=generator) + 0.5,
        "support_ids_NK": torch.randint(0, V, (count, K), generator=generator),
        "top_k": 4,
        "entropy_gradient": True,
    }
    return LogitsRequest(**values | changes)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_values_and_gradients(chunk_tokens):
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(0), requires_grad=True)
    places = torch.tensor([0, 2, 3, 4, 9, 10])
    asked = request(places)
    found = logits_logprobs(logits, places, asked, OneProcess(), chunk_tokens=chunk_tokens)
    rows = logits[places]
    whole = torch.log_softmax(rows, dim=-1)
    assert asked.temperatures_N is not None
    assert asked.support_ids_NK is not None
    heated = torch.log_softmax(rows / asked.temperatures_N.unsqueeze(-1), dim=-1)
    ids = asked.ids_N.unsqueeze(-1)
    wanted = (
        whole.gather(-1, ids).squeeze(-1),
        heated.gather(-1, ids).squeeze(-1),
        -(whole.exp() * whole).sum(dim=-1),
        whole.gather(-1, asked.support_ids_NK),
    )
    assert found.support_NK is not None
    actual = (found.logprobs_N, found.sampled_N, found.entropy_N, found.support_NK)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other)
        (gradient,) = torch.autograd.grad(one.square().sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad(other.square().sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
    assert found.topk_ids_NK is not None
    assert torch.equal(found.topk_ids_NK, rows.topk(4, dim=-1).indices)


def test_one_tensor_where_every_temperature_is_1():
    places = torch.arange(3)
    asked = request(places, temperatures_N=torch.ones(3), support_ids_NK=None, top_k=0)
    found = logits_logprobs(torch.randn(3, V), places, asked, OneProcess(), chunk_tokens=2)
    assert found.sampled_N is found.logprobs_N
    assert (found.support_NK, found.topk_ids_NK) == (None, None)


def test_masked_ids_have_no_probability_and_add_nothing():
    logits = torch.randn(2, V)
    logits[:, 5] = -torch.inf
    logits.requires_grad_()
    places = torch.arange(2)
    asked = request(places, ids_N=torch.tensor([5, 6]), temperatures_N=None)
    found = logits_logprobs(logits, places, asked, OneProcess(), chunk_tokens=2)
    assert found.logprobs_N[0] == -torch.inf
    torch.testing.assert_close(
        found.entropy_N, torch.distributions.Categorical(logits=logits).entropy()
    )
    (found.logprobs_N[1] + found.entropy_N.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_is_nan_and_has_no_gradient(value):
    logits = torch.randn(3, V)
    logits[1, 2] = value
    logits.requires_grad_()
    places = torch.arange(3)
    found = logits_logprobs(logits, places, request(places), OneProcess(), chunk_tokens=3)
    assert found.logprobs_N.isnan().tolist() == [False, True, False]
    assert found.sampled_N.isnan().tolist() == [False, True, False]
    found.logprobs_N.nansum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[1].any()


def test_no_token_is_asked_for():
    logits = torch.randn(4, V, requires_grad=True)
    places = torch.zeros(0, dtype=torch.long)
    found = logits_logprobs(logits, places, request(places), OneProcess(), chunk_tokens=2)
    assert len(found.logprobs_N) == 0
    found.logprobs_N.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()
