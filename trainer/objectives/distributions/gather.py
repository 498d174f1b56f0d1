"""Log-probabilities at the tokens of a support, out of logits, and overlap of two supports.

The normaliser is that of the whole vocabulary, taken in chunks of tokens: no [N, V] log-softmax in
float32 ever exists beside the logits (ALGORITHMS 2.5), neither forward nor backward. Arithmetic is
in float32 for narrower inputs, in float64 for float64. It knows no divergence.

Shapes: any leading [...] or N of it flattened, V vocabulary, K support.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 4096


def at_least_float32(values: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; float32 and float64 as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def support_logprobs(logits: Tensor, ids: Tensor, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Global log-softmax of `logits` [..., V] at `ids` [..., K] -> [..., K], with gradient.

    Ids lie within the vocabulary. Raises ValueError if the leading shapes differ or `chunk_tokens`
    is not positive.
    """
    if logits.shape[:-1] != ids.shape[:-1]:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and support ids of {tuple(ids.shape)} must "
            "agree in all but the last dimension"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    gathered_NK = _ChunkedGather.apply(
        logits.reshape(-1, logits.shape[-1]), ids.long().reshape(-1, ids.shape[-1]), chunk_tokens
    )
    assert isinstance(gathered_NK, Tensor)
    return gathered_NK.reshape(ids.shape)


def token_logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability [...] of one token per position, `logits` [..., V], `tokens` [...]."""
    return support_logprobs(logits, tokens.unsqueeze(-1)).squeeze(-1)


def full_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax [..., V] of everything: what a divergence over the whole vocabulary needs."""
    return torch.log_softmax(at_least_float32(logits), dim=-1)


def top_k_logprobs(
    logits: Tensor, k: int, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """(ids [..., k], log-probs [..., k]) of the k likeliest tokens, likeliest first.

    The log-probs carry gradient. Raises ValueError unless 1 <= k <= V.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"top-k needs 1 <= k <= {logits.shape[-1]} (the vocabulary), got {k}")
    ids = torch.topk(logits.detach(), k, dim=-1).indices
    return ids, support_logprobs(logits, ids, chunk_tokens=chunk_tokens)


@torch.no_grad()
def shared_ids(ids: Tensor, other_ids: Tensor) -> Tensor:
    """Bool [..., K]: which of `ids` are also in the same position's `other_ids` [..., J].

    Negative ids mark empty places and are shared with nothing. Raises ValueError if the leading
    shapes differ.
    """
    if ids.shape[:-1] != other_ids.shape[:-1]:
        raise ValueError(
            f"id sets of shapes {tuple(ids.shape)} and {tuple(other_ids.shape)} must agree in all "
            "but the last dimension"
        )
    if not other_ids.shape[-1]:
        return torch.zeros_like(ids, dtype=torch.bool)
    # A search in sorted rows: comparing every pair would take K x J per token.
    ordered = other_ids.long().sort(dim=-1).values
    places = torch.searchsorted(ordered, ids.long().contiguous()).clamp(max=ordered.shape[-1] - 1)
    return (ordered.gather(-1, places) == ids) & (ids >= 0)


def overlap_counts(ids: Tensor, other_ids: Tensor) -> Tensor:
    """How many ids [...] the two sets of each position have in common, int64."""
    return shared_ids(ids, other_ids).sum(dim=-1)


class _ChunkedGather(torch.autograd.Function):
    """logits [N, V], ids [N, K] -> logits[ids] - logsumexp(logits); keeps no float32 copy.

    The maximum is taken out first: a token near probability 1 would else be off by the rounding of
    its logit, and the rest of the distribution with it.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, chunk_tokens: int) -> Tensor:
        dtype = at_least_float32(logits_NV[:0]).dtype
        max_N1, log_sum_N1 = logits_NV.new_empty((2, len(logits_NV), 1), dtype=dtype)
        gathered_NK = logits_NV.new_empty(ids_NK.shape, dtype=dtype)
        for part in _parts(len(logits_NV), chunk_tokens):
            max_N1[part] = logits_NV[part].amax(dim=-1, keepdim=True)
            below = logits_NV[part].to(dtype, copy=True).sub_(max_N1[part])
            gathered_NK[part] = below.gather(-1, ids_NK[part])
            log_sum_N1[part] = below.exp_().sum(dim=-1, keepdim=True).log_()
        ctx.save_for_backward(logits_NV, ids_NK, max_N1, log_sum_N1)
        ctx.chunk_tokens = chunk_tokens
        return gathered_NK.sub_(log_sum_N1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_NK,) = grads
        logits_NV, ids_NK, max_N1, log_sum_N1 = ctx.saved_tensors
        dtype = max_N1.dtype
        grad_logits_NV = torch.empty_like(logits_NV)
        for part in _parts(len(logits_NV), ctx.chunk_tokens):
            below = logits_NV[part].to(dtype, copy=True).sub_(max_N1[part])
            softmax = below.sub_(log_sum_N1[part]).exp_()
            chunk = softmax.mul_(-grad_NK[part].sum(dim=-1, keepdim=True))
            chunk.scatter_add_(-1, ids_NK[part], grad_NK[part])
            # Logits of a token that nobody asked for may be anything, NaN too.
            unused_N1 = (grad_NK[part] == 0).all(dim=-1, keepdim=True)
            grad_logits_NV[part] = chunk.masked_fill_(unused_N1, 0.0)
        return grad_logits_NV, None, None


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
