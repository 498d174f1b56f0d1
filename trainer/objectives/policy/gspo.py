"""GSPO: PPO-clip with one ratio per sequence, the geometric mean of its tokens' ratios.

A heuristic, not an approximation of the product of ratios. With turn ids a sequence is one turn.
Formula: ALGORITHMS 6.6. It knows no reduction. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import selected, sequence_means
from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.policy.ppo import PpoTerms, clipped_surrogate

GspoForm = Literal["token", "sequence"]
TOKEN_LIMIT = 10.0
"""Upper clamp of the logarithm of a ratio in the token form."""


def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    form: GspoForm = "token",
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    turn_ids_BT: Tensor | None = None,
) -> PpoTerms:
    """max(-A s, -A clip(s)) per token [B, T], s = exp(mean_t(l - lo)) of the token's sequence.

    Both forms have the same value. In the `token` form each token's s has the gradient of its own
    log-prob, so that advantages may differ between tokens; in the `sequence` form it has that of
    the mean. log s is clamped to [-20, 10] in the first form and +-20 in the second. `kl` is lo - l
    per token in the first, its mean in the second, not clamped. Values at mask 0 are ignored.
    Raises ValueError for a token at mask 1 without turn id and for an unknown form.
    """
    logprobs_BT = selected(logprobs_BT, mask_BT)
    gaps_BT = logprobs_BT - selected(old_logprobs_BT, mask_BT).detach()
    means_BT = sequence_means(gaps_BT, mask_BT, turn_ids_BT)
    if form == "token":
        kl_BT = -gaps_BT
        log_ratios_BT = logprobs_BT - logprobs_BT.detach() + means_BT.detach()
        log_ratios_BT = torch.clamp(log_ratios_BT, -LOG_RATIO_LIMIT, TOKEN_LIMIT)
    elif form == "sequence":
        kl_BT = -means_BT
        log_ratios_BT = torch.clamp(means_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    else:
        raise ValueError(f"the form of GSPO is token or sequence, got {form!r}")
    terms = clipped_surrogate(
        log_ratios_BT,
        selected(advantages_BT, mask_BT),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=None if weights is None else selected(weights, mask_BT),
    )
    return replace(terms, kl=kl_BT.detach())
