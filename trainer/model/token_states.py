"""What a model says about tokens: hidden states of rows, and log-probs of the sampled tokens and of
others at their positions.

What rows that begin alike share goes through the model once, and its keys and values serve all of
them. States and gradients are the same as those of each row alone. Log-probs, of sampled tokens and
of those that a `TokenRequest` names, are computed from hidden states and the output layer, a chunk
of tokens at a time: the [N, V] logits of a batch never exist at once.

Shapes: B rows, T tokens, N policy tokens, H hidden size, V vocabulary, K tokens per position; keys
and values are [B, heads, T, head size].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from trainer.objectives.distributions.side_samples import draw_side_samples
from trainer.objectives.linear.logprobs import CHUNK_VOCAB, linear_logprobs
from trainer.objectives.linear.tiles import LogitTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer: logits are `hidden @ weight_VH.T + bias_V`, bent by `softcap` c to
    c tanh(logits / c).
    """

    weight_VH: Tensor
    bias_V: Tensor | None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Tokens other than the sampled ones; all at temperature 1.

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
    """Anything that gives log-probs of tokens: a policy, one without its adapters, a teacher."""

    def token_logprobs(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperatures_BT: Tensor | None = None,
        request: TokenRequest = PLAIN,
    ) -> TokenLogprobs:
        """Log-probs of the tokens at mask 1."""
        ...


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

    `temperatures_BT` are positive; None or all 1 computes one log-prob per token. `chunk_tokens` is
    how many tokens' logits exist at the same time.
    """
    support_ids = request.support_ids_BTK
    found = linear_logprobs(
        hidden_NH,
        head.weight_VH,
        ids_BT[wanted_BT],
        bias_V=head.bias_V,
        temperatures_N=None if temperatures_BT is None else temperatures_BT[wanted_BT],
        support_ids_NK=None if support_ids is None else support_ids[wanted_BT],
        top_k=min(request.top_k, head.weight_VH.shape[0]),
        want_entropy="gradient" if request.entropy_gradient else True,
        softcap=head.softcap,
        chunk_tokens=chunk_tokens,
    )
    assert found.entropy_N is not None
    plain_BT = _scatter(found.logprobs, wanted_BT)
    same = found.logprobs_sampled is found.logprobs
    drawn_ids, drawn = (
        _draw(hidden_NH, head, request, chunk_tokens) if request.draw else (None, None)
    )
    return TokenLogprobs(
        logprobs_BT=plain_BT,
        logprobs_sampled_BT=plain_BT if same else _scatter(found.logprobs_sampled, wanted_BT),
        entropy_BT=_scatter(found.entropy_N, wanted_BT),
        support_BTK=_scatter_known(found.support_NK, wanted_BT),
        topk_ids_BTK=_scatter_known(found.topk_ids_NK, wanted_BT),
        topk_BTK=_scatter_known(found.topk_NK, wanted_BT),
        drawn_ids_BTK=_scatter_known(drawn_ids, wanted_BT),
        drawn_BTK=_scatter_known(drawn, wanted_BT),
    )


@torch.no_grad()
def _draw(
    hidden_NH: Tensor, head: Head, request: TokenRequest, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs) [N, m] of tokens sampled from the whole distribution at temperature 1."""
    ids, logprobs = [], []
    for start in range(0, max(len(hidden_NH), 1), chunk_tokens):
        logits_NV = _logits(hidden_NH[start : start + chunk_tokens], head)
        drawn = draw_side_samples(logits_NV, request.draw, generator=request.generator)
        ids.append(drawn.ids)
        logprobs.append(drawn.logprobs)
    return torch.cat(ids), torch.cat(logprobs)


def _logits(hidden_NH: Tensor, head: Head) -> Tensor:
    """[N, V] in float32; a weight of lower precision is converted part by part."""
    tiles = LogitTiles(
        hidden_NH=hidden_NH.float(),
        weight_VH=head.weight_VH,
        bias_V=head.bias_V,
        softcap=head.softcap,
        chunk_tokens=len(hidden_NH),
        chunk_vocab=CHUNK_VOCAB,
    )
    logits_NV = tiles.hidden_NH.new_empty(len(hidden_NH), len(head.weight_VH))
    buffer = tiles.buffer()
    # Autocast would round the logits too coarsely for log-probs.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        for tile in tiles.vocab_tiles():
            part = slice(tile.start, tile.start + tile.size)
            logits_NV[:, part] = tiles.logits(slice(None), tile, buffer)
    return logits_NV


def _scatter_known(values: Tensor | None, wanted_BT: Tensor) -> Tensor | None:
    return None if values is None else _scatter(values, wanted_BT)


def _scatter(values_N: Tensor, wanted_BT: Tensor) -> Tensor:
    """[N] or [N, K] values at the wanted places in row order, 0 elsewhere."""
    if values_N.dim() == 1:
        return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_N)
    result = values_N.new_zeros((*wanted_BT.shape, values_N.shape[-1]))
    return result.masked_scatter(wanted_BT.unsqueeze(-1), values_N)


_LEAST_SAVED = 64
"""Sharing fewer tokens is not worth a second pass through the layers."""


class BehindPrefix(DynamicCache):
    """The cache of a prefix, for the rows that follow it. It keeps nothing of these, so a layer
    that is computed again for its gradients finds it unchanged.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix and of what follows it."""
        layer: Any = self.layers[layer_idx]
        both = ((layer.keys, key_states), (layer.values, value_states))
        keys, values = (
            torch.cat([before.expand(len(behind), -1, -1, -1), behind], dim=-2)
            for before, behind in both
        )
        return keys, values


def shared_length(ids_BT: Tensor, mask_BT: Tensor) -> int:
    """Leading tokens that all rows have in common, before the first wanted state: that of the token
    before the first at mask 1. 0 if sharing them saves little.
    """
    wanted = (mask_BT > 0).any(dim=0).nonzero()
    if len(ids_BT) < 2 or not len(wanted):
        return 0
    differs = (ids_BT != ids_BT[:1]).any(dim=0).nonzero()
    alike = int(differs[0]) if len(differs) else ids_BT.shape[1]
    length = min(alike, int(wanted[0]) - 1)
    return length if length * (len(ids_BT) - 1) >= _LEAST_SAVED else 0


def states_behind(decoder: nn.Module, ids_BT: Tensor, length: int) -> Tensor:
    """Hidden states [B, T - length, H] after the first `length` tokens, which are the same in every
    row.
    """
    if not length:
        return decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
    prefix = DynamicCache()
    decoder(input_ids=ids_BT[:1, :length], past_key_values=prefix, use_cache=True)
    behind = BehindPrefix()
    behind.layers = prefix.layers
    found = decoder(input_ids=ids_BT[:, length:], past_key_values=behind, use_cache=True)
    return found.last_hidden_state
