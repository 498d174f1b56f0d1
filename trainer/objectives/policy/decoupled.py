"""Decoupled PPO: the policy that sampled and the policy that bounds the step are not the same.

A ratio against proximal log-probs `lp` is clipped; the ratio of the proximal policy to the sampling
(behaviour) policy `lb` is a detached weight. Formulas: ALGORITHMS 6.3 and 6.9. It knows no masks
and no reduction; any shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import comparable_ratio, log_ratio
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledTerms:
    """`ppo` is the weighted surrogate against the proximal policy.

    `weights` are those that were applied, 0 above the cap. Detached, except `ppo.loss`.
    """

    ppo: PpoTerms
    weights: Tensor


def decoupled_ppo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cap: float | None = None,
    weights: Tensor | None = None,
) -> DecoupledTerms:
    """sg(exp(clip(lp - lb, +-20))) x PPO(l, lp); a weight above `cap` becomes 0, not the cap.

    `weights` (detached) multiply on top, for a source of mismatch that is not staleness. Raises
    ValueError for a cap that is not positive.
    """
    staleness = behaviour_weights(proximal_logprobs, behaviour_logprobs, cap=cap)
    applied = staleness if weights is None else staleness * weights.detach()
    terms = ppo_clip(
        logprobs,
        proximal_logprobs.detach(),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        weights=applied,
    )
    return DecoupledTerms(ppo=terms, weights=applied)


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float | None = None
) -> Tensor:
    """exp(clip(lp - lb, +-20)), 0 where that is above `cap`; detached."""
    if cap is not None and cap <= 0:
        raise ValueError(f"the cap of behaviour weights must be positive, got {cap}")
    ratio = torch.exp(log_ratio(proximal_logprobs, behaviour_logprobs))
    return ratio if cap is None else torch.where(ratio > cap, torch.zeros_like(ratio), ratio)


@torch.no_grad()
def a3po_proximal_logprobs(
    behaviour_logprobs: Tensor, current_logprobs: Tensor, version_gap: Tensor | int
) -> Tensor:
    """Proximal log-probs without a pass of their own: lb / d + (1 - 1 / d) l for a version gap d.

    A gap of 0 gives the current log-probs: nothing is stale. `version_gap` broadcasts against the
    log-probs. Raises ValueError for a negative gap.
    """
    gap = torch.as_tensor(version_gap, device=current_logprobs.device).to(current_logprobs.dtype)
    if bool((gap < 0).any()):
        raise ValueError("a3po_proximal_logprobs: a version gap is negative; pass steps since")
    share = torch.where(gap > 0, 1.0 / gap.clamp(min=1.0), torch.zeros_like(gap))
    return share * behaviour_logprobs + (1.0 - share) * current_logprobs


@torch.no_grad()
def composed_weights(
    engine_logprobs: Tensor,
    trainer_logprobs: Tensor,
    proximal_logprobs: Tensor,
    *,
    engine_cap: float = 2.0,
    staleness_cap: float | None = None,
) -> Tensor:
    """min(exp(lk - lr), engine_cap) x exp(lp - lk) for PPO(l, lp); detached.

    `lr` and `lk` are the log-probs of the sampling weights in the engine and in the trainer. The
    first factor removes the engine's difference, the second the staleness, in this order. A token
    at which the engine cannot be compared has a first factor of 1, whatever the cap. Raises
    ValueError for a cap that is not positive.
    """
    if engine_cap <= 0:
        raise ValueError(f"the cap of importance weights must be positive, got {engine_cap}")
    ratio = comparable_ratio(trainer_logprobs, engine_logprobs)
    engine = torch.where(torch.isnan(engine_logprobs), ratio, ratio.clamp(max=engine_cap))
    return engine * behaviour_weights(proximal_logprobs, trainer_logprobs, cap=staleness_cap)
