"""Log-probs from hidden states and the output layer, without the [N, V] logits.

`linear_logprobs` gives in one pass, for each of N tokens: the log-probs of given ids at temperature
1 and at the token's sampling temperature (ALGORITHMS 1.9), the entropy (ALGORITHMS 2.3), the
log-probs of further ids and the likeliest ids (the supports of ALGORITHMS 2.5-2.7). The forward
pass keeps a few numbers per token; the backward pass computes the logits again. Either holds a few
tiles of `chunk_tokens` x `chunk_vocab` logits besides the gradients themselves.

It knows no masks, no rows of a batch and no loss.

Shapes: N tokens, V vocabulary, H hidden size, K ids per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.objectives.linear.gradients import TokenState, layer_gradients
from trainer.objectives.linear.tiles import LogitTiles, token_values

# Fastest of those measured by benchmarks/logprob_memory.py on a CPU; a float32 tile is 32 MiB.
CHUNK_TOKENS = 1024
CHUNK_VOCAB = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLogprobs:
    """Natural logs in float32 (float64 for float64 inputs).

    `logprobs` (temperature 1) and `logprobs_sampled` (each token's sampling temperature; the same
    tensor if that is 1 everywhere) are shaped like the ids; `support_NK` like the support ids.
    `entropy_N` and `logsumexp_N` are at temperature 1. Top-k is sorted, likeliest first. What was
    not asked for is None. All carry gradients except top-k and an entropy not asked for with one.
    """

    logprobs: Tensor
    logprobs_sampled: Tensor
    logsumexp_N: Tensor
    entropy_N: Tensor | None = None
    support_NK: Tensor | None = None
    topk_ids_NK: Tensor | None = None
    topk_NK: Tensor | None = None


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperatures_N: Tensor | None = None,
    support_ids_NK: Tensor | None = None,
    top_k: int = 0,
    want_entropy: bool | Literal["gradient"] = False,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_vocab: int = CHUNK_VOCAB,
) -> LinearLogprobs:
    """Log-probs of `ids` [N] or [N, K] under softmax(hidden_NH @ weight_VH.T + bias_V).

    `softcap` c makes the logits c tanh(logits / c). `temperatures_N` are positive and divide the
    logits of `logprobs_sampled`. Logits are float32 whatever the dtype of hidden states and weight,
    also under autocast; gradients are summed in float32 and come in the dtype of their tensor. A
    weight or hidden states without requires_grad cost no gradient. Tokens whose incoming gradients
    are all zero cost none either, and their values (NaN included) reach no gradient. A logit of
    -inf (a masked id) is allowed. Not twice differentiable. Raises ValueError for shapes that do
    not fit, ids outside the vocabulary and temperatures that are not positive.
    """
    _check_shapes(hidden_NH, weight_VH, bias_V, ids, support_ids_NK)
    _check_options(weight_VH.shape[0], top_k, softcap, chunk_tokens, chunk_vocab)
    columns_NK = ids if ids.dim() == 2 else ids.unsqueeze(1)
    sampled_columns = columns_NK.shape[1]
    if support_ids_NK is not None:
        columns_NK = torch.cat([columns_NK, support_ids_NK], dim=1)
    columns_NK = columns_NK.long()
    _check_ids(columns_NK, weight_VH.shape[0])
    options = LinearOptions(
        sampled_columns=sampled_columns,
        want_entropy=bool(want_entropy),
        entropy_gradient=want_entropy == "gradient",
        top_k=top_k,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
    )
    temperatures_N = _other_temperatures(temperatures_N, hidden_NH.shape[0])
    logprobs_NK, tempered_NS, entropy_N, logsumexp_N, topk_ids_NK, topk_NK = (
        LinearLogprobsFunction.apply(
            hidden_NH, weight_VH, bias_V, columns_NK, temperatures_N, options
        )
    )
    logprobs = logprobs_NK[:, :sampled_columns].reshape(ids.shape)
    return LinearLogprobs(
        logprobs=logprobs,
        logprobs_sampled=logprobs if tempered_NS is None else tempered_NS.reshape(ids.shape),
        logsumexp_N=logsumexp_N,
        entropy_N=entropy_N,
        support_NK=None if support_ids_NK is None else logprobs_NK[:, sampled_columns:],
        topk_ids_NK=topk_ids_NK if top_k else None,
        topk_NK=topk_NK if top_k else None,
    )


def _check_shapes(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids: Tensor,
    support_ids_NK: Tensor | None,
) -> None:
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"linear_logprobs needs hidden states [N, H] and a weight [V, H], "
            f"got {list(hidden_NH.shape)} and {list(weight_VH.shape)}"
        )
    if bias_V is not None and bias_V.shape != weight_VH.shape[:1]:
        raise ValueError(
            f"linear_logprobs needs a bias [{weight_VH.shape[0]}], got {list(bias_V.shape)}"
        )
    if ids.dim() not in (1, 2) or len(ids) != len(hidden_NH):
        raise ValueError(
            f"linear_logprobs needs ids [N] or [N, K] with N = {len(hidden_NH)}, "
            f"got {list(ids.shape)}"
        )
    if support_ids_NK is not None and (
        support_ids_NK.dim() != 2 or len(support_ids_NK) != len(hidden_NH)
    ):
        raise ValueError(
            f"linear_logprobs needs support ids [N, K] with N = {len(hidden_NH)}, "
            f"got {list(support_ids_NK.shape)}"
        )


def _check_options(
    vocab_size: int, top_k: int, softcap: float | None, chunk_tokens: int, chunk_vocab: int
) -> None:
    if not 0 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be from 0 to the {vocab_size} ids there are, got {top_k}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, or None for none, got {softcap}")
    if chunk_tokens < 1 or chunk_vocab < 1:
        raise ValueError(
            f"chunk_tokens and chunk_vocab must be at least 1, got {chunk_tokens}, {chunk_vocab}"
        )


def _check_ids(ids_NK: Tensor, vocab_size: int) -> None:
    if ids_NK.numel() and not bool(((ids_NK >= 0) & (ids_NK < vocab_size)).all()):
        raise ValueError(
            f"an id is outside the vocabulary of {vocab_size}; give padding any id and mask it"
        )


def _other_temperatures(temperatures_N: Tensor | None, num_tokens: int) -> Tensor | None:
    """None if all are 1."""
    if temperatures_N is None:
        return None
    if temperatures_N.shape != (num_tokens,):
        raise ValueError(
            f"linear_logprobs needs temperatures [{num_tokens}], got {list(temperatures_N.shape)}"
        )
    if not bool(((temperatures_N > 0) & torch.isfinite(temperatures_N)).all()):
        raise ValueError("temperatures must be positive; score greedy tokens at temperature 1")
    return None if bool((temperatures_N == 1.0).all()) else temperatures_N.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions:
    """What to compute; the first `sampled_columns` ids also get log-probs at temperature T."""

    sampled_columns: int
    want_entropy: bool
    entropy_gradient: bool
    top_k: int
    softcap: float | None
    chunk_tokens: int
    chunk_vocab: int

    def tiles(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> LogitTiles:
        """Tiles in float32, or float64 if an input is."""
        wider = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
        return LogitTiles(
            hidden_NH=hidden_NH.to(torch.promote_types(wider, torch.float32)),
            weight_VH=weight_VH,
            bias_V=bias_V,
            softcap=self.softcap,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
        )


class LinearLogprobsFunction(torch.autograd.Function):
    """(log-probs [N, K], those at T [N, S] or None, entropy [N] or None, logsumexp [N],
    top-k ids, top-k log-probs). Top-k, and entropy unless asked for, carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_NK: Tensor,
        temperatures_N: Tensor | None,
        options: LinearOptions,
    ) -> tuple[Tensor | None, ...]:
        tiles = options.tiles(hidden_NH, weight_VH, bias_V)
        inverse_N = None
        if temperatures_N is not None:
            inverse_N = temperatures_N.to(tiles.hidden_NH.dtype).reciprocal()
        found = token_values(
            tiles,
            ids_NK,
            inverse_N,
            sampled_columns=options.sampled_columns,
            want_entropy=options.want_entropy,
            top_k=options.top_k,
        )
        ctx.save_for_backward(
            *(hidden_NH, weight_VH, bias_V, ids_NK),
            *(found.logsumexp_N, found.entropy_N, inverse_N, found.tempered_logsumexp_N),
        )
        ctx.options = options
        ctx.set_materialize_grads(False)
        fixed = [found.top_ids_NK, found.top_NK]
        if found.entropy_N is not None and not options.entropy_gradient:
            fixed.append(found.entropy_N)
        ctx.mark_non_differentiable(*fixed)
        return (
            *(found.logprobs_NK, found.tempered_NS, found.entropy_N, found.logsumexp_N),
            *(found.top_ids_NK, found.top_NK),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_NK, *kept = ctx.saved_tensors
        state = TokenState(
            ids_NK=ids_NK,
            logsumexp_N=kept[0],
            entropy_N=kept[1],
            inverse_temperatures_N=kept[2],
            tempered_logsumexp_N=kept[3],
        )
        tiles = ctx.options.tiles(hidden_NH, weight_VH, bias_V)
        gradient_NH, gradient_VH, gradient_V = layer_gradients(
            tiles, state, gradients[:4], ctx.needs_input_grad[:3], hidden_NH.dtype
        )
        if gradient_V is not None and bias_V is not None:
            gradient_V = gradient_V.to(bias_V.dtype)
        return gradient_NH, gradient_VH, gradient_V, None, None, None
