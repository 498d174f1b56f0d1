"""The autograd function behind logprobs.py: statistics forward, logits again backward.

It saves its inputs and a few numbers per token. Checks of the input are the caller's.

Shapes: N tokens, V vocabulary, H hidden size, K ids per token, S of them also at temperature T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.objectives.linear.coefficients import Coefficients, TokenState
from trainer.objectives.linear.gradients import LayerGradients
from trainer.objectives.linear.statistics import TokenStatistics
from trainer.objectives.linear.tiles import LogitTiles


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
        statistics = TokenStatistics(
            tiles, ids_NK, inverse_N, want_entropy=options.want_entropy, top_k=options.top_k
        )
        # Autocast would round the logits, which log-probs cannot afford.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            statistics.add_all(tiles)
        logsumexp_N = statistics.logsumexp_N()
        tempered_N = statistics.tempered_logsumexp_N()
        entropy_N = statistics.entropy_N()
        tempered_NS = statistics.tempered_logprobs(
            statistics.picked_NK[:, : options.sampled_columns]
        )
        top_NK = statistics.logprobs(statistics.top_NK)
        ctx.save_for_backward(
            *(hidden_NH, weight_VH, bias_V),
            *(ids_NK, logsumexp_N, entropy_N, inverse_N, tempered_N),
        )
        ctx.options = options
        ctx.set_materialize_grads(False)
        fixed = [statistics.top_ids_NK, top_NK]
        if entropy_N is not None and not options.entropy_gradient:
            fixed.append(entropy_N)
        ctx.mark_non_differentiable(*fixed)
        logprobs_NK = statistics.logprobs(statistics.picked_NK)
        return logprobs_NK, tempered_NS, entropy_N, logsumexp_N, statistics.top_ids_NK, top_NK

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
        logprobs_NK, tempered_NS, entropy_N, logsumexp_N, *_ = gradients
        coefficients = Coefficients.of(state, logprobs_NK, tempered_NS, entropy_N, logsumexp_N)
        active_N = coefficients.active_N()
        if active_N is None:
            return (None,) * 6
        tiles = ctx.options.tiles(hidden_NH, weight_VH, bias_V)
        index_M = None
        if not bool(active_N.all()):
            index_M = active_N.nonzero().squeeze(1)
            tiles, state = tiles.select(index_M), state.rows(index_M)
            coefficients = coefficients.rows(index_M)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sums = LayerGradients(tiles, hidden=wants_hidden, weight=wants_weight, bias=wants_bias)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            sums.add_all(tiles, state, coefficients)
        gradient_NH = sums.hidden_NH
        if gradient_NH is not None:
            gradient_NH = gradient_NH.to(hidden_NH.dtype)
            if index_M is not None:
                gradient_NH = torch.zeros_like(hidden_NH).index_copy_(0, index_M, gradient_NH)
        gradient_V = None if sums.bias_V is None or bias_V is None else sums.bias_V.to(bias_V.dtype)
        return gradient_NH, sums.weight_VH, gradient_V, None, None, None
