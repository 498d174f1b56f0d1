"""Log-probs from logits whose vocabulary is split over ranks: the input of slime's loss hook.

The embedded trainer computes the same from hidden states (objectives/linear/logprobs.py) and never
holds logits; Megatron has made them already. One chunk of rows is done at a time and computed again
for the backward pass, so that besides the logits only their gradient has their size.

Shapes: T rows of logits, N of them wanted, t and n those of one chunk; V vocabulary, v this rank's
part of it; K ids per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.slime.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRequest:
    """What is wanted of N tokens: log-probs of `ids_N`, also at `temperatures_N` (positive; None:
    all 1), of `support_ids_NK`; the `top_k` likeliest ids. The entropy has a gradient if asked for.
    """

    ids_N: Tensor
    temperatures_N: Tensor | None
    support_ids_NK: Tensor | None
    top_k: int
    entropy_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsLogprobs:
    """Natural logs in float32, at temperature 1 except `sampled_N` (the same tensor if every
    temperature is 1). NaN, without gradient, for a token whose logits are not finite. `topk_ids_NK`
    and an entropy not asked for with one have no gradient.
    """

    logprobs_N: Tensor
    sampled_N: Tensor
    entropy_N: Tensor
    support_NK: Tensor | None
    topk_ids_NK: Tensor | None


def logits_logprobs(
    logits_Tv: Tensor,
    places_N: Tensor,
    request: LogitsRequest,
    ranks: Ranks,
    *,
    chunk_tokens: int,
) -> LogitsLogprobs:
    """Log-probs of N tokens, each under the row `places_N` (ascending) of the logits."""
    temperatures_N = request.temperatures_N
    if temperatures_N is not None and bool((temperatures_N == 1.0).all()):
        temperatures_N = None
    columns_NK = request.ids_N.unsqueeze(-1)
    if request.support_ids_NK is not None:
        columns_NK = torch.cat([columns_NK, request.support_ids_NK], dim=-1)
    found, tops = [], []
    # One split: its gradient is put together once; with slices, once for each of them.
    for number, logits_tv in enumerate(logits_Tv.split(chunk_tokens)):
        first = number * chunk_tokens
        edges = torch.tensor([first, first + len(logits_tv)], device=places_N.device)
        start, end = torch.searchsorted(places_N, edges).tolist()
        places_n = places_N[start:end] - first
        inverse_n = None if temperatures_N is None else 1.0 / temperatures_N[start:end]
        values = checkpoint(
            _chunk,
            logits_tv,
            places_n,
            columns_NK[start:end],
            inverse_n,
            request.entropy_gradient,
            ranks,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        found.append(values)
        if request.top_k:
            tops.append(_top_ids(logits_tv.detach()[places_n], request.top_k, ranks))
    picked_NK, sampled_N, entropy_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    logprobs_N = picked_NK[:, 0]
    return LogitsLogprobs(
        logprobs_N=logprobs_N,
        sampled_N=logprobs_N if temperatures_N is None else sampled_N,
        entropy_N=entropy_N,
        support_NK=None if request.support_ids_NK is None else picked_NK[:, 1:],
        topk_ids_NK=torch.cat(tops) if tops else None,
    )


def _chunk(
    logits_tv: Tensor,
    places_n: Tensor,
    columns_nK: Tensor,
    inverse_n: Tensor | None,
    entropy_gradient: bool,
    ranks: Ranks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs at the columns, of the first column at its temperature, entropies."""
    finite_n1, logits_nv = _finite(logits_tv[places_n].float(), ranks)
    picked_nK = _pick(logits_nv, columns_nK, ranks)
    peak_n1 = _peak(logits_nv, ranks)
    exp_nv = torch.exp(logits_nv - peak_n1)
    sum_n1 = ranks.vocabulary_sum(exp_nv.sum(dim=-1, keepdim=True))
    normaliser_n1 = peak_n1 + sum_n1.log()
    logprobs_nK = torch.where(finite_n1, picked_nK - normaliser_n1, torch.nan)
    sampled_n = logprobs_nK[:, 0]
    if inverse_n is not None:
        tempered_nv = torch.exp((logits_nv - peak_n1) * inverse_n.unsqueeze(-1))
        tempered_n1 = ranks.vocabulary_sum(tempered_nv.sum(dim=-1, keepdim=True))
        value_n1 = (picked_nK[:, :1] - peak_n1) * inverse_n.unsqueeze(-1) - tempered_n1.log()
        sampled_n = torch.where(finite_n1, value_n1, torch.nan).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A masked id has logit -inf and probability 0: it adds nothing.
        terms_nv = exp_nv * torch.where(exp_nv > 0, logits_nv, torch.zeros_like(logits_nv))
        mean_n1 = ranks.vocabulary_sum(terms_nv.sum(dim=-1, keepdim=True)) / sum_n1
        entropy_n = (normaliser_n1 - mean_n1).squeeze(-1)
    return logprobs_nK, sampled_n, entropy_n


def _finite(logits_nv: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Which tokens [n, 1] have usable logits, and zeros in place of the others: NaN must reach no
    gradient. -inf is a masked id and allowed.
    """
    broken_n1 = (logits_nv.isnan() | (logits_nv == torch.inf)).any(dim=-1, keepdim=True)
    all_masked_n1 = torch.isneginf(_peak(logits_nv, ranks))
    broken_n1 = (ranks.vocabulary_max(broken_n1.to(logits_nv.dtype)) > 0) | all_masked_n1
    return ~broken_n1, torch.where(broken_n1, torch.zeros_like(logits_nv), logits_nv)


@torch.no_grad()
def _peak(logits_nv: Tensor, ranks: Ranks) -> Tensor:
    return ranks.vocabulary_max(logits_nv.amax(dim=-1, keepdim=True))


def _pick(logits_nv: Tensor, columns_nK: Tensor, ranks: Ranks) -> Tensor:
    """Logits [n, K] of ids, from the rank that holds each."""
    size = logits_nv.shape[-1]
    local_nK = columns_nK - ranks.vocabulary_start(size)
    here_nK = (local_nK >= 0) & (local_nK < size)
    values_nK = logits_nv.gather(-1, local_nK.clamp(0, size - 1))
    return ranks.vocabulary_sum(torch.where(here_nK, values_nK, torch.zeros_like(values_nK)))


@torch.no_grad()
def _top_ids(logits_nv: Tensor, top_k: int, ranks: Ranks) -> Tensor:
    """The likeliest ids [N, top_k] of the whole vocabulary, likeliest first."""
    size = logits_nv.shape[-1]
    own = torch.topk(logits_nv, min(top_k, size), dim=-1)
    ids_NK = own.indices + ranks.vocabulary_start(size)
    values_NJ = torch.cat(ranks.vocabulary_parts(own.values), dim=-1)
    ids_NJ = torch.cat(ranks.vocabulary_parts(ids_NK), dim=-1)
    places_NK = torch.topk(values_NJ, min(top_k, values_NJ.shape[-1]), dim=-1).indices
    return ids_NJ.gather(-1, places_NK)
