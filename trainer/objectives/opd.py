"""Hindsight-hint on-policy distillation: the loss of one micro-batch and everything it reports.

    L = R(w PPO(l, lo, A)) + beta_kl R(KL(l, lf)) - beta_entropy R(entropy)        (ALGORITHMS 2.3)
    A = sg(lt - lb) at temperature 1; PPO ratio and w at the SAMPLE's temperature   (ALGORITHMS 1.9)
    R = mean over the non-empty turns of the GLOBAL batch of the mean over a turn's tokens

It knows tensors only: no model, no store. Reduced values of micro-batches add up to those of the
batch. Shapes: B rows, T tokens; element [b, t] is about token t, not about the logit row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.advantage import distillation_advantage
from trainer.objectives.aggregate import count_turns, token_weights, weighted_sum
from trainer.objectives.kl import k3_clamped, kl_estimate
from trainer.objectives.kl_names import validate_kl_loss_name
from trainer.objectives.ppo import PpoTerms, ppo_clip
from trainer.objectives.truncated_is import TruncatedWeights, truncated_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdSettings:
    """Coefficients of the loss; names and defaults as in `TrainerConfig`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tis_cap: float | None = 2.0
    beta_kl: float = 0.02
    kl_type: str = "low_var_kl"
    beta_entropy: float = 0.0
    advantage_reference: Literal["old", "current"] = "old"

    def __post_init__(self) -> None:
        validate_kl_loss_name(self.kl_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What an objective sees of one micro-batch, all [B, T].

    `logprobs_BT` is at temperature 1 and `logprobs_sampled_BT` at each token's sampling temperature
    (the same tensor where that is 1); both carry gradients. `old_*` are the same two at the start
    of the batch, detached. `rollout_logprobs_BT` is NaN where it cannot be compared.
    """

    logprobs_BT: Tensor
    logprobs_sampled_BT: Tensor
    old_logprobs_BT: Tensor
    old_logprobs_sampled_BT: Tensor
    reference_logprobs_BT: Tensor | None
    teacher_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor
    turn_ids_BT: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveResult:
    """`loss` carries the gradient. The rest is detached.

    `reduced` are values under R, additive over micro-batches; `token_sums` are sums over tokens and
    `token_max` maxima, from which the batch's statistics are made. `pg_loss` is the distillation
    term alone, with gradient. `mask_BT` is the mask after non-finite tokens were taken out.
    """

    loss: Tensor
    pg_loss: Tensor
    reduced: dict[str, Tensor]
    token_sums: dict[str, Tensor]
    token_max: dict[str, Tensor]
    advantages_BT: Tensor
    mask_BT: Tensor
    num_turns: int


def hindsight_opd_loss(
    batch: TokenBatch, settings: OpdSettings, num_turns: int | None = None
) -> ObjectiveResult:
    """Loss and reports of one micro-batch of a batch with `num_turns` non-empty turns.

    `num_turns` defaults to the turns of this micro-batch. Tokens whose trainer-side log-probs are
    not finite are dropped and counted in `token_sums["nonfinite"]`; an empty mask gives a
    differentiable zero. Raises ValueError if the reference is needed and absent.
    """
    if settings.beta_kl > 0 and batch.reference_logprobs_BT is None:
        raise ValueError("beta_kl > 0 needs reference log-probs")
    clean, num_nonfinite = _select_finite(batch)
    weights_BT = token_weights(
        clean.mask_BT,
        "turn-mean-token-mean",
        turn_ids_BT=clean.turn_ids_BT,
        num_turns=num_turns,
    )
    base_BT = (
        clean.old_logprobs_BT
        if settings.advantage_reference == "old"
        else clean.logprobs_BT.detach()
    )
    advantages_BT = distillation_advantage(clean.teacher_logprobs_BT, base_BT)
    importance = _importance(clean, settings)
    terms = ppo_clip(
        clean.logprobs_sampled_BT,
        clean.old_logprobs_sampled_BT,
        advantages_BT,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        weights=importance.weights if importance is not None else None,
    )
    pg_loss = weighted_sum(terms.loss, weights_BT)
    entropy = weighted_sum(clean.entropy_BT, weights_BT)
    loss = pg_loss
    reduced = {"pg_loss": pg_loss, "entropy_loss": entropy}
    if clean.reference_logprobs_BT is not None:
        kl_BT = kl_estimate(settings.kl_type, clean.logprobs_BT, clean.reference_logprobs_BT)
        kl_loss = weighted_sum(kl_BT, weights_BT)
        clamped_BT = k3_clamped(clean.logprobs_BT.detach(), clean.reference_logprobs_BT)
        reduced |= {"kl_loss": kl_loss, "kl/clamped_frac": weighted_sum(clamped_BT, weights_BT)}
        if settings.beta_kl > 0:
            loss = loss + settings.beta_kl * kl_loss
    if settings.beta_entropy != 0:
        loss = loss - settings.beta_entropy * entropy
    reduced |= {"loss": loss} | _ratio_reports(clean, terms, importance, weights_BT)
    sums, maxima = _token_reports(clean.mask_BT, advantages_BT, terms.ratio)
    return ObjectiveResult(
        loss=loss,
        pg_loss=pg_loss,
        reduced={name: value.detach() for name, value in reduced.items()},
        token_sums=sums | {"nonfinite": num_nonfinite},
        token_max=maxima,
        advantages_BT=advantages_BT,
        mask_BT=clean.mask_BT,
        num_turns=count_turns(clean.mask_BT, clean.turn_ids_BT),
    )


def _select_finite(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """The batch with zeros wherever the mask is 0, and how many tokens were not finite.

    A non-finite trainer-side value takes its token out of the mask; a teacher's value must be
    finite, samples with another were dropped before.
    """
    mask_BT = batch.mask_BT > 0
    finite_BT = mask_BT.clone()
    trainer_side = [
        batch.logprobs_BT,
        batch.logprobs_sampled_BT,
        batch.old_logprobs_BT,
        batch.old_logprobs_sampled_BT,
    ]
    if batch.reference_logprobs_BT is not None:
        trainer_side.append(batch.reference_logprobs_BT)
    for values_BT in trainer_side:
        finite_BT &= torch.isfinite(values_BT.detach())
    if not bool(torch.isfinite(batch.teacher_logprobs_BT[finite_BT]).all()):
        raise ValueError("a teacher log-prob at a policy token is not finite")

    def select(values_BT: Tensor) -> Tensor:
        return torch.where(finite_BT, values_BT, torch.zeros_like(values_BT))

    same = batch.logprobs_sampled_BT is batch.logprobs_BT
    same_old = batch.old_logprobs_sampled_BT is batch.old_logprobs_BT
    logprobs_BT, old_BT = select(batch.logprobs_BT), select(batch.old_logprobs_BT)
    reference = batch.reference_logprobs_BT
    clean = TokenBatch(
        logprobs_BT=logprobs_BT,
        logprobs_sampled_BT=logprobs_BT if same else select(batch.logprobs_sampled_BT),
        old_logprobs_BT=old_BT,
        old_logprobs_sampled_BT=old_BT if same_old else select(batch.old_logprobs_sampled_BT),
        reference_logprobs_BT=None if reference is None else select(reference),
        teacher_logprobs_BT=select(batch.teacher_logprobs_BT),
        rollout_logprobs_BT=select(batch.rollout_logprobs_BT),
        entropy_BT=select(batch.entropy_BT),
        mask_BT=finite_BT.to(batch.mask_BT.dtype),
        turn_ids_BT=batch.turn_ids_BT,
    )
    return clean, (mask_BT & ~finite_BT).sum()


def _importance(clean: TokenBatch, settings: OpdSettings) -> TruncatedWeights | None:
    if settings.tis_cap is None:
        return None
    return truncated_weights(
        clean.old_logprobs_sampled_BT.detach(), clean.rollout_logprobs_BT, cap=settings.tis_cap
    )


def _ratio_reports(
    clean: TokenBatch, terms: PpoTerms, importance: TruncatedWeights | None, weights_BT: Tensor
) -> dict[str, Tensor]:
    """Clip fractions, KL to `old`, trainer against rollout engine; all under R."""
    comparable_BT = torch.isfinite(clean.rollout_logprobs_BT)
    gap_BT = (clean.old_logprobs_sampled_BT - clean.rollout_logprobs_BT).abs()
    gap_BT = torch.where(comparable_BT, gap_BT, torch.zeros_like(gap_BT))
    reports = {
        "pg_clipfrac": weighted_sum(terms.clipped, weights_BT),
        "pg_clipfrac_lower": weighted_sum(terms.clipped_lower, weights_BT),
        "ppo_kl": weighted_sum(terms.kl, weights_BT),
        # Of comparable tokens alone: a mean over them is this over `rollout_comparable_frac`.
        "train_rollout_logprob_abs_diff": weighted_sum(gap_BT, weights_BT),
        "rollout_comparable_frac": weighted_sum(comparable_BT.to(gap_BT.dtype), weights_BT),
    }
    if importance is not None:
        reports |= {
            "tis": weighted_sum(importance.weights, weights_BT),
            "tis_clipfrac": weighted_sum(importance.capped, weights_BT),
            "tis_abs": weighted_sum((importance.ratio - 1.0).abs(), weights_BT),
        }
    return reports


@torch.no_grad()
def _token_reports(
    mask_BT: Tensor, advantages_BT: Tensor, ratio_BT: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums in float64 over policy tokens, and maxima (0 for an empty mask)."""
    advantages = advantages_BT[mask_BT > 0].double()
    ratios = ratio_BT[mask_BT > 0].double()
    sums = {
        "tokens": mask_BT.double().sum(),
        "adv": advantages.sum(),
        "adv_squared": advantages.square().sum(),
        "adv_abs": advantages.abs().sum(),
        "adv_positive": (advantages > 0).double().sum(),
    }
    zero = advantages.new_zeros(())
    maxima = {
        "adv_abs_max": advantages.abs().max() if advantages.numel() else zero,
        "ratio_max": ratios.max() if ratios.numel() else zero,
    }
    return sums, maxima
