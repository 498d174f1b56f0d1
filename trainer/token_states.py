"""What a model says about tokens: log-probs of the sampled ones, and of others at their positions.

A `TokenRequest` names the others. Everything is computed from hidden states and the output layer, a
chunk of tokens at a time: the [N, V] logits of a batch never exist at once.

Shapes: B rows, T tokens, N policy tokens, H hidden size, V vocabulary, K tokens per position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer: logits are `hidden @ weight_VH.T + bias_V`."""

    weight_VH: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Other tokens than the sampled ones; all at temperature 1.

    `support_ids_BTK` are gathered with gradient; the `top_k` likeliest and `draw` tokens sampled
    with replacement from the whole distribution are found without.
    """

    support_ids_BTK: Tensor | None = None
    top_k: int = 0
    draw: int = 0
    generator: torch.Generator | None = None
    entropy_gradient: bool = False


PLAIN = TokenRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """[B, T], 0 outside the mask: log-probs at temperature 1, at the sampling temperature (the same
    tensor if that is 1 everywhere), entropy at temperature 1; what was requested as [B, T, K], ids
    0 and log-probs 0 outside the mask.
    """

    logprobs_BT: Tensor
    logprobs_sampled_BT: Tensor
    entropy_BT: Tensor
    support_BTK: Tensor | None = None
    topk_ids_BTK: Tensor | None = None
    topk_BTK: Tensor | None = None
    drawn_ids_BTK: Tensor | None = None
    drawn_BTK: Tensor | None = None


class LogprobModel(Protocol):
    """What gives log-probs of tokens: a policy, one seen without its adapters, a teacher."""

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1."""
        ...


@dataclass(slots=True, kw_only=True)
class _Chunks:
    """What the chunks gave, in order."""

    plain: list[Tensor] = field(default_factory=list)
    sampled: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    support: list[Tensor] = field(default_factory=list)
    others: list[tuple[Tensor, ...]] = field(default_factory=list)


def token_logprobs(
    hidden_NH: Tensor,
    head: Head,
    ids_BT: Tensor,
    wanted_BT: Tensor,
    temperatures_BT: Tensor | None,
    request: TokenRequest,
    *,
    chunk_tokens: int,
) -> TokenLogprobs:
    """Log-probs of the wanted tokens, whose scoring rows' states are `hidden_NH`, in row order.

    `temperatures_BT` are positive; None or all 1 computes one log-prob per token.
    """
    targets_N = ids_BT[wanted_BT]
    temperatures_N = None
    if temperatures_BT is not None:
        selected = temperatures_BT[wanted_BT]
        temperatures_N = None if bool((selected == 1.0).all()) else selected
    support_NK = None if request.support_ids_BTK is None else request.support_ids_BTK[wanted_BT]
    chunks = _Chunks()
    recompute = (
        len(targets_N) > chunk_tokens and torch.is_grad_enabled() and hidden_NH.requires_grad
    )
    for start in range(0, max(len(targets_N), 1), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        arguments = (
            hidden_NH[part],
            head.weight_VH,
            head.bias_V,
            targets_N[part],
            None if temperatures_N is None else temperatures_N[part],
            None if support_NK is None else support_NK[part],
            request.entropy_gradient,
        )
        # With several chunks the logits are computed again in the backward pass, so that only one
        # chunk's exist at a time.
        plain, sampled, entropy, support = (
            checkpoint(_chunk, *arguments, use_reentrant=False) if recompute else _chunk(*arguments)
        )
        chunks.plain.append(plain)
        chunks.sampled.append(sampled)
        chunks.entropy.append(entropy)
        if support is not None:
            chunks.support.append(support)
        if request.top_k or request.draw:
            chunks.others.append(_other_tokens(hidden_NH[part], head, request))
    return _assemble(chunks, wanted_BT, temperatures_N is not None, request)


def _chunk(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor | None,
    support_NK: Tensor | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    logits_NV = _logits(hidden_NH, weight_VH, bias_V)
    normaliser_N = torch.logsumexp(logits_NV, dim=-1)
    target_logits_N = logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    plain_N = target_logits_N - normaliser_N
    sampled_N = plain_N
    if temperatures_N is not None:
        scaled_NV = logits_NV / temperatures_N.unsqueeze(-1)
        sampled_N = target_logits_N / temperatures_N - torch.logsumexp(scaled_NV, dim=-1)
    support = None
    if support_NK is not None:
        support = logits_NV.gather(-1, support_NK) - normaliser_N.unsqueeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities_NV = torch.exp(logits_NV - normaliser_N.unsqueeze(-1))
        entropy_N = normaliser_N - (probabilities_NV * logits_NV).sum(dim=-1)
    return plain_N, sampled_N, entropy_N, support


@torch.no_grad()
def _other_tokens(hidden_NH: Tensor, head: Head, request: TokenRequest) -> tuple[Tensor, ...]:
    """(top-k ids, their log-probs, drawn ids, their log-probs), those asked for."""
    logprobs_NV = torch.log_softmax(_logits(hidden_NH, head.weight_VH, head.bias_V), dim=-1)
    found: tuple[Tensor, ...] = ()
    if request.top_k:
        values, ids = torch.topk(logprobs_NV, min(request.top_k, logprobs_NV.shape[-1]), dim=-1)
        found += (ids, values)
    if request.draw:
        ids = torch.multinomial(
            logprobs_NV.exp(), request.draw, replacement=True, generator=request.generator
        )
        found += (ids, logprobs_NV.gather(-1, ids))
    return found


def _logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    # Autocast would round the logits, which log-probs cannot afford.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return torch.nn.functional.linear(hidden_NH.float(), weight_VH.float(), bias_V).float()


def _assemble(
    chunks: _Chunks, wanted_BT: Tensor, has_temperatures: bool, request: TokenRequest
) -> TokenLogprobs:
    plain_BT = _scatter(torch.cat(chunks.plain), wanted_BT)
    others = [torch.cat(column) for column in zip(*chunks.others, strict=True)]
    scattered = [_scatter(column, wanted_BT) for column in others]
    top = scattered[:2] if request.top_k else [None, None]
    drawn = scattered[-2:] if request.draw else [None, None]
    return TokenLogprobs(
        logprobs_BT=plain_BT,
        logprobs_sampled_BT=(
            _scatter(torch.cat(chunks.sampled), wanted_BT) if has_temperatures else plain_BT
        ),
        entropy_BT=_scatter(torch.cat(chunks.entropy), wanted_BT),
        support_BTK=_scatter(torch.cat(chunks.support), wanted_BT) if chunks.support else None,
        topk_ids_BTK=top[0],
        topk_BTK=top[1],
        drawn_ids_BTK=drawn[0],
        drawn_BTK=drawn[1],
    )


def _scatter(values_N: Tensor, wanted_BT: Tensor) -> Tensor:
    """[N] or [N, K] values at the wanted places in row order, 0 elsewhere."""
    if values_N.dim() == 1:
        return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_N)
    result = values_N.new_zeros((*wanted_BT.shape, values_N.shape[-1]))
    return result.masked_scatter(wanted_BT.unsqueeze(-1), values_N)
