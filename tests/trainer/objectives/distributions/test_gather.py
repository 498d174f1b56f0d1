import pytest
import torch

from trainer.objectives.distributions.gather import (
    full_logprobs,
    overlap_counts,
    shared_ids,
    support_logprobs,
    token_logprobs_of,
    top_k_logprobs,
)


def _logits_and_ids(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, 11, (2, 5, 4), generator=generator)
    return logits, ids


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 4096])
def test_values_and_gradients_are_those_of_a_log_softmax(chunk_tokens):
    logits, ids = _logits_and_ids()
    ours = logits.clone().requires_grad_()
    dense = logits.clone().requires_grad_()
    upstream = torch.randn(ids.shape, generator=torch.Generator().manual_seed(4)).double()
    value = support_logprobs(ours, ids, chunk_tokens=chunk_tokens)
    expected = torch.log_softmax(dense, dim=-1).gather(-1, ids)
    torch.testing.assert_close(value, expected)
    (value * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, dense.grad)


def test_gradient_against_finite_differences():
    logits, ids = _logits_and_ids()
    torch.autograd.gradcheck(
        lambda values: support_logprobs(values, ids, chunk_tokens=3), logits.requires_grad_()
    )


def test_an_id_that_stands_twice_collects_both_gradients():
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    support_logprobs(logits, torch.tensor([[1, 1]])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-2, 4, -2]], dtype=torch.float64) / 3)


def test_narrow_types_are_computed_in_float32():
    logits, ids = _logits_and_ids(torch.bfloat16)
    value = support_logprobs(logits.requires_grad_(), ids, chunk_tokens=2)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.detach(), torch.log_softmax(logits.detach().float(), dim=-1).gather(-1, ids)
    )
    value.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert full_logprobs(logits).dtype == torch.float32


def test_garbage_in_a_row_without_gradient_stays_there():
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf]], requires_grad=True)
    value = support_logprobs(logits, torch.tensor([[0], [0]]))
    torch.where(torch.tensor([[True], [False]]), value, torch.zeros(())).sum().backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0]
    assert logits.grad[0].abs().min() > 0


def test_impossible_tokens_of_a_padded_vocabulary():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    value = support_logprobs(logits, torch.tensor([[0]]))
    value.sum().backward()
    assert value.item() == pytest.approx(-0.6931472)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_top_k_and_single_tokens():
    logits, _ = _logits_and_ids()
    ids, values = top_k_logprobs(logits, 3)
    expected = torch.log_softmax(logits, dim=-1).topk(3, dim=-1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values, expected.values)
    torch.testing.assert_close(token_logprobs_of(logits, ids[..., 0]), values[..., 0])


def test_no_tokens():
    ids, values = top_k_logprobs(torch.zeros(0, 5), 2)
    assert ids.shape == values.shape == (0, 2)


def test_overlap_of_unordered_sets_leaves_empty_places_out():
    ids = torch.tensor([[7, 2, 9], [1, -1, -1]])
    others = torch.tensor([[9, 7, 3, 100], [-1, -1, 5, 1]], dtype=torch.int32)
    assert shared_ids(ids, others).tolist() == [[True, False, True], [True, False, False]]
    assert overlap_counts(ids, others).tolist() == [2, 1]
    assert overlap_counts(ids, torch.zeros(2, 0, dtype=torch.long)).tolist() == [0, 0]


@pytest.mark.parametrize("k", [0, 6])
def test_k_must_fit_the_vocabulary(k):
    with pytest.raises(ValueError, match="1 <= k <= 5"):
        top_k_logprobs(torch.zeros(2, 5), k)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="last dimension"):
        support_logprobs(torch.zeros(2, 5), torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="last dimension"):
        shared_ids(torch.zeros(2, 5), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="chunk_tokens"):
        support_logprobs(torch.zeros(1, 5), torch.zeros(1, 1, dtype=torch.long), chunk_tokens=0)


def test_confident_rows_are_as_exact_as_log_softmax():
    torch.manual_seed(3)
    logits = 10.0 * torch.randn(200, 500)
    ids = logits.topk(3, dim=-1).indices
    exact = torch.log_softmax(logits.double(), dim=-1).gather(-1, ids)
    plain = torch.log_softmax(logits, dim=-1).gather(-1, ids)
    error = (support_logprobs(logits, ids) - exact).abs().max()
    assert error <= 1.5 * (plain - exact).abs().max()
