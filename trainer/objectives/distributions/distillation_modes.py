"""A divergence from the teacher as a loss (GKD) or as the advantage of a policy gradient (PG).

    D -> least and largest -> clip(D, +-loss_max_clamp) -> branch                 (ALGORITHMS 2.4)
    GKD: L = D, with the gradient through D
    PG:  L = PPO(l, lo, A = -sg(D), dual clip) x rollout weights
    total = task loss + coef x AGG(L) with task rewards, AGG(L) without

D is an estimator of `trainer.objectives.distributions.kl` or that of forward_kl.py. AGG is a weight
per token of `trainer.objectives.aggregate`. Which combinations make sense is said in validation.py;
nothing here refuses one.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.kl import kl_estimate
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """Names and defaults of verl's YAML file (ALGORITHMS 2.4 and 9 item 7).

    `coef` acts with `use_task_rewards` only. `dual_clip` None means off.
    """

    loss_mode: str = "k3"
    use_policy_gradient: bool = False
    use_task_rewards: bool = True
    coef: float = 1.0
    loss_max_clamp: float | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationTerms:
    """Per token [B, T]: `loss` with gradient, 0 at mask 0; the rest detached.

    `divergence` is D before the clamp. `advantages` is NaN and `policy` None without policy
    gradient.
    """

    loss: Tensor
    divergence: Tensor
    advantages: Tensor
    policy: PpoTerms | None


def estimator_divergence(
    loss_mode: str, logprobs_BT: Tensor, teacher_logprobs_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """D [B, T] of the estimator `loss_mode` with gradient; what stands at mask 0 does not enter."""
    return kl_estimate(
        loss_mode, _select(logprobs_BT, mask_BT), _select(teacher_logprobs_BT, mask_BT)
    )


def distillation_terms(
    divergence_BT: Tensor,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mask_BT: Tensor,
    settings: DistillationSettings,
    *,
    rollout_weights_BT: Tensor | None = None,
) -> DistillationTerms:
    """The loss of each token by the settings' branch.

    `rollout_weights_BT` are detached and act on a policy gradient only.
    """
    selected_BT = _select(divergence_BT, mask_BT)
    clamped_BT = selected_BT
    if settings.loss_max_clamp is not None:
        clamped_BT = torch.clamp(selected_BT, -settings.loss_max_clamp, settings.loss_max_clamp)
    if not settings.use_policy_gradient:
        return DistillationTerms(
            loss=clamped_BT,
            divergence=selected_BT.detach(),
            advantages=torch.full_like(clamped_BT, float("nan")).detach(),
            policy=None,
        )
    advantages_BT = -clamped_BT.detach()
    policy = policy_terms(
        advantages_BT,
        logprobs_BT,
        old_logprobs_BT,
        mask_BT,
        settings,
        rollout_weights_BT=rollout_weights_BT,
    )
    return DistillationTerms(
        loss=policy.loss,
        divergence=selected_BT.detach(),
        advantages=advantages_BT,
        policy=policy,
    )


def policy_terms(
    advantages_BT: Tensor,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mask_BT: Tensor,
    settings: DistillationSettings,
    *,
    rollout_weights_BT: Tensor | None = None,
) -> PpoTerms:
    """The settings' clipped surrogate: for the distillation advantage and for that of the task."""
    weights_BT = rollout_weights_BT
    return ppo_clip(
        _select(logprobs_BT, mask_BT),
        _select(old_logprobs_BT, mask_BT),
        _select(advantages_BT, mask_BT).detach(),
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        weights=None if weights_BT is None else _select(weights_BT, mask_BT),
    )


def total_loss(
    distillation_loss: Tensor, task_loss: Tensor | None, settings: DistillationSettings
) -> Tensor:
    """Task loss + coef x distillation loss with task rewards, else the distillation loss alone.

    Raises ValueError if task rewards are on and there is no task loss.
    """
    if not settings.use_task_rewards:
        return distillation_loss
    if task_loss is None:
        raise ValueError("use_task_rewards is on and there is no task loss; pass it or switch off")
    return task_loss + settings.coef * distillation_loss


@torch.no_grad()
def distillation_metrics(
    terms: DistillationTerms, mask_BT: Tensor, weights_BT: Tensor, *, is_estimator: bool
) -> dict[str, Tensor]:
    """Scalars: `loss` under the weights of AGG; `loss_min`, `loss_max` and `abs_loss` before the
    clamp, NaN of an empty mask; with policy gradient also those of `policy_metrics`.

    `abs_loss` is a mean over tokens and exists for estimators only.
    """
    values = terms.divergence[mask_BT > 0]
    nan = terms.divergence.new_full((), float("nan"))
    is_empty = values.numel() == 0
    metrics = {
        "loss": weighted_sum(terms.loss, weights_BT),
        "loss_min": nan if is_empty else values.min(),
        "loss_max": nan if is_empty else values.max(),
    }
    if is_estimator:
        metrics["abs_loss"] = nan if is_empty else values.abs().mean()
    if terms.policy is not None:
        metrics |= policy_metrics(terms.policy, mask_BT)
    return metrics


@torch.no_grad()
def policy_metrics(policy: PpoTerms, mask_BT: Tensor) -> dict[str, Tensor]:
    """Means over tokens: `pg_clipfrac`, `ppo_kl`, `pg_clipfrac_lower`; 0 of an empty mask."""
    means_BT = token_weights(mask_BT, "token-mean")
    return {
        "pg_clipfrac": weighted_sum(policy.clipped, means_BT),
        "ppo_kl": weighted_sum(policy.kl, means_BT),
        "pg_clipfrac_lower": weighted_sum(policy.clipped_lower, means_BT),
    }


def _select(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT > 0, values_BT, torch.zeros_like(values_BT))
