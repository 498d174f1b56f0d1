import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.objectives.linear.logprobs import LinearLogprobs, linear_logprobs

N, V, H, K = 11, 29, 6, 3
TILES = [(1, 1), (4, 8), (64, 64), (3, 29), (11, 5)]


def inputs(dtype=torch.float64):
    """(hidden, weight, bias, ids, temperatures, support ids); the first three want gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(N, H, dtype=dtype).mul_(2).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype).requires_grad_()
    bias = torch.randn(V, dtype=dtype).requires_grad_()
    ids = torch.randint(V, (N,))
    temperatures = torch.rand(N, dtype=dtype) + 0.5
    temperatures[::3] = 1.0
    support = torch.randint(V, (N, K))
    # The same id twice, and the sampled one.
    support[0] = support[0, 0]
    support[1, 0] = ids[1]
    return hidden, weight, bias, ids, temperatures, support


def plain(hidden, weight, bias, ids, temperatures, support, softcap=None) -> LinearLogprobs:
    """The same by log_softmax and gather."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits, dim=-1)
    tempered = torch.log_softmax(logits / temperatures.unsqueeze(1), dim=-1)
    top = torch.topk(logprobs.detach(), 7, dim=-1)
    return LinearLogprobs(
        logprobs=logprobs.gather(1, ids.unsqueeze(1)).squeeze(1),
        logprobs_sampled=tempered.gather(1, ids.unsqueeze(1)).squeeze(1),
        logsumexp_N=torch.logsumexp(logits, dim=-1),
        entropy_N=-(logprobs.exp() * logprobs).sum(dim=-1),
        support_NK=logprobs.gather(1, support),
        topk_ids_NK=top.indices,
        topk_NK=top.values,
    )


def weighted(result: LinearLogprobs, names: list[str]) -> Tensor:
    """A scalar in which each named field has another weight at each place."""
    total = torch.zeros((), dtype=torch.float64)
    for number, name in enumerate(names):
        value = getattr(result, name)
        weights = torch.linspace(-1.0, 2.0 + number, value.numel(), dtype=torch.float64)
        total = total + (value.double().flatten() * weights).sum()
    return total


@pytest.mark.parametrize(("chunk_tokens", "chunk_vocab"), TILES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "used",
    [
        ["logprobs"],
        ["logprobs_sampled"],
        ["entropy_N"],
        ["logsumexp_N"],
        ["support_NK", "logprobs_sampled"],
        ["logprobs", "logprobs_sampled", "entropy_N", "logsumexp_N", "support_NK"],
    ],
    ids=" ".join,
)
def test_values_and_gradients_are_those_of_log_softmax(used, softcap, chunk_tokens, chunk_vocab):
    hidden, weight, bias, ids, temperatures, support = inputs()
    expected = plain(*inputs(), softcap=softcap)
    found = linear_logprobs(
        hidden,
        weight,
        ids,
        bias_V=bias,
        temperatures_N=temperatures,
        support_ids_NK=support,
        top_k=7,
        want_entropy="gradient",
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
    )
    for item in fields(expected):
        torch.testing.assert_close(
            getattr(found, item.name), getattr(expected, item.name), rtol=1e-12, atol=1e-12
        )
    others = inputs()
    weighted(found, used).backward()
    weighted(plain(*others, softcap=softcap), used).backward()
    for tensor, other in zip((hidden, weight, bias), others, strict=False):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-11, atol=1e-11)


def test_gradcheck():
    hidden, weight, bias, ids, temperatures, support = inputs()

    def outputs(*tensors: Tensor):
        found = linear_logprobs(
            tensors[0],
            tensors[1],
            ids,
            bias_V=tensors[2],
            temperatures_N=temperatures,
            support_ids_NK=support,
            want_entropy="gradient",
            softcap=4.0,
            chunk_tokens=4,
            chunk_vocab=8,
        )
        parts = (found.logprobs, found.logprobs_sampled, found.entropy_N, found.support_NK)
        return tuple(part for part in parts if part is not None)

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_give_float32_logits_and_sums(dtype):
    hidden, weight, _, ids, _, _ = inputs(torch.float32)
    half, half_weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight))
    found = linear_logprobs(half, half_weight, ids, chunk_tokens=2, chunk_vocab=8)
    found.logprobs.sum().backward()
    wide, wide_weight = (t.detach().float().requires_grad_() for t in (half, half_weight))
    logprobs = torch.log_softmax(wide @ wide_weight.t(), dim=-1)
    expected = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    expected.sum().backward()
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close(found.logprobs, expected)
    for tensor, other in ((half, wide), (half_weight, wide_weight)):
        # One rounding, of the sum.
        assert other.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad.to(dtype), rtol=0.01, atol=1e-5)


def test_autocast_does_not_round_the_logits():
    hidden, weight, _, ids, _, _ = inputs(torch.float32)
    expected = linear_logprobs(hidden, weight, ids).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(hidden, weight, ids).logprobs
        found.sum().backward()
    gradient, weight.grad = weight.grad, None
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradient, weight.grad, rtol=0, atol=0)


def test_a_frozen_weight_costs_no_gradient_and_no_grad_no_graph():
    hidden, weight, _, ids, _, _ = inputs()
    frozen = weight.detach()
    expected = torch.autograd.grad(linear_logprobs(hidden, weight, ids).logprobs.sum(), hidden)[0]
    linear_logprobs(hidden, frozen, ids, chunk_vocab=8).logprobs.sum().backward()
    assert frozen.grad is None
    torch.testing.assert_close(hidden.grad, expected)
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, ids).logprobs.requires_grad


def test_tied_embeddings_sum_both_gradients():
    _, weight, _, ids, _, _ = inputs()
    found = linear_logprobs(weight[ids], weight, ids, chunk_vocab=8)
    found.logprobs.sum().backward()
    other = inputs()[1]
    torch.log_softmax(other[ids] @ other.t(), -1).gather(1, ids.unsqueeze(1)).sum().backward()
    torch.testing.assert_close(weight.grad, other.grad)


def test_worked_numbers():
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    found = linear_logprobs(
        torch.ones(1, 1, dtype=torch.float64),
        logits.t(),
        torch.tensor([[0, 2]]),
        temperatures_N=torch.tensor([0.5]),
        top_k=1,
        want_entropy=True,
        chunk_vocab=2,
    )
    assert found.logprobs.flatten().exp().tolist() == pytest.approx([0.5, 0.25])
    assert found.logprobs_sampled.flatten().exp().tolist() == pytest.approx([2 / 3, 1 / 6])
    assert found.entropy_N is not None
    assert found.topk_ids_NK is not None
    assert found.entropy_N.item() == pytest.approx(1.5 * math.log(2))
    assert found.topk_ids_NK.tolist() == [[0]]


def test_temperature_1_everywhere_is_the_same_tensor():
    hidden, weight, _, ids, _, _ = inputs()
    found = linear_logprobs(hidden, weight, ids, temperatures_N=torch.ones(N))
    assert found.logprobs_sampled is found.logprobs


def test_entropy_for_monitoring_carries_no_gradient():
    hidden, weight, _, ids, _, _ = inputs()
    found = linear_logprobs(hidden, weight, ids, want_entropy=True, top_k=2)
    assert found.entropy_N is not None
    assert found.topk_NK is not None
    assert not found.entropy_N.requires_grad
    assert not found.topk_NK.requires_grad


def test_large_logits_neither_overflow_nor_lose_the_small_ones():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.arange(6.0).unsqueeze(1).requires_grad_()
    temperatures = torch.tensor([0.01, 50.0])
    found = linear_logprobs(
        hidden,
        weight,
        torch.tensor([5, 4]),
        temperatures_N=temperatures,
        want_entropy="gradient",
        chunk_vocab=2,
    )
    assert found.logprobs.tolist() == [0.0, -4000.0]
    assert found.logprobs_sampled.tolist() == pytest.approx([0.0, -80.0])
    weighted(found, ["logprobs", "logprobs_sampled", "entropy_N"]).backward()
    assert hidden.grad is not None
    assert bool(torch.isfinite(hidden.grad).all())


def test_masked_ids_are_as_if_absent():
    hidden, weight, bias, ids, temperatures, _ = inputs()
    ids = ids % 8
    masked = bias.detach().clone()
    masked[8:] = -torch.inf
    options = {"temperatures_N": temperatures, "want_entropy": "gradient", "chunk_vocab": 8}
    # The first tile too: its maximum is -inf.
    turned = linear_logprobs(hidden, weight.flip(0), V - 1 - ids, bias_V=masked.flip(0), **options)
    others = inputs()
    expected = linear_logprobs(
        others[0], others[1][:8], ids, bias_V=others[2][:8].detach(), **options
    )
    for found in (turned, expected):
        weighted(found, ["logprobs", "logprobs_sampled", "entropy_N"]).backward()
    torch.testing.assert_close(turned.entropy_N, expected.entropy_N)
    torch.testing.assert_close(hidden.grad, others[0].grad)
    torch.testing.assert_close(weight.grad, others[1].grad)


def test_a_nan_token_without_gradient_reaches_nothing():
    hidden, weight, _, ids, _, _ = inputs()
    expected = torch.autograd.grad(linear_logprobs(hidden, weight, ids).logprobs[2:].sum(), weight)
    spoilt = hidden.detach().clone()
    spoilt[:2] = torch.nan
    spoilt.requires_grad_()
    found = linear_logprobs(spoilt, weight, ids, want_entropy="gradient", chunk_tokens=4)
    torch.where(torch.isfinite(found.logprobs), found.logprobs, 0.0).sum().backward()
    assert bool(torch.isnan(found.logprobs[:2]).all())
    assert spoilt.grad is not None
    assert bool((spoilt.grad[:2] == 0).all())
    assert bool(torch.isfinite(spoilt.grad).all())
    torch.testing.assert_close(weight.grad, expected[0])


@pytest.mark.parametrize("num_tokens", [0, N])
def test_a_loss_of_no_token_is_a_differentiable_zero(num_tokens):
    hidden, weight, bias, ids, _, _ = inputs()
    hidden = hidden.detach()[:num_tokens].requires_grad_()
    found = linear_logprobs(
        hidden, weight, ids[:num_tokens], bias_V=bias, top_k=2, want_entropy=True
    )
    (0.0 * found.logprobs.sum()).backward()
    assert found.topk_ids_NK is not None
    assert found.topk_ids_NK.shape == (num_tokens, 2)
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert bool((tensor.grad == 0).all())


def test_no_allocation_is_as_large_as_the_logits():
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, (tuple, list)) else [result]
            sizes = [tensor.numel() for tensor in outputs if isinstance(tensor, Tensor)]
            largest = max([largest, *sizes])
            return result

    hidden = torch.randn(200, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    ids = torch.randint(300, (200,))
    with Watch():
        found = linear_logprobs(
            hidden,
            weight,
            ids,
            temperatures_N=torch.full((200,), 0.7),
            support_ids_NK=ids.unsqueeze(1).expand(-1, 4),
            top_k=4,
            want_entropy="gradient",
            chunk_tokens=16,
            chunk_vocab=32,
        )
        weighted(found, ["logprobs", "logprobs_sampled", "entropy_N", "support_NK"]).backward()
    assert 16 * 32 <= largest < 200 * 300 / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.full((N,), V)}, "outside the vocabulary"),
        ({"ids": torch.full((N,), -100)}, "outside the vocabulary"),
        ({"ids": torch.zeros(N - 1).long()}, "ids"),
        ({"weight_VH": torch.randn(V, H + 1)}, "hidden states"),
        ({"bias_V": torch.randn(V - 1)}, "bias"),
        ({"support_ids_NK": torch.zeros(N).long()}, "support ids"),
        ({"temperatures_N": torch.zeros(N)}, "positive"),
        ({"temperatures_N": torch.full((N,), torch.nan)}, "positive"),
        ({"temperatures_N": torch.ones(N, 1)}, "temperatures"),
        ({"top_k": V + 1}, "top_k"),
        ({"softcap": 0.0}, "softcap"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_bad_input_says_what_is_wrong(changes, message):
    arguments = {
        "hidden_NH": torch.randn(N, H),
        "weight_VH": torch.randn(V, H),
        "ids": torch.zeros(N).long(),
    }
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**(arguments | changes))


def test_confident_tokens_are_as_exact_as_log_softmax():
    torch.manual_seed(3)
    # Hidden states that are rows of the identity: the logits are the weight's, without rounding.
    logits = 10.0 * torch.randn(64, 300)
    hidden, weight = torch.eye(64), logits.T.contiguous()
    ids = logits.argmax(dim=-1)
    exact = torch.log_softmax(logits.double(), dim=-1).amax(dim=-1)
    plain = torch.log_softmax(logits, dim=-1).amax(dim=-1)
    limit = 2.0 * (plain - exact).abs().max()
    for chunk_vocab in (300, 17):
        ours = linear_logprobs(hidden, weight, ids, top_k=1, chunk_vocab=chunk_vocab)
        assert (ours.logprobs - exact).abs().max() <= limit
        assert (ours.topk_NK[:, 0] - exact).abs().max() <= limit
