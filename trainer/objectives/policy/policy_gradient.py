"""Policy gradient with the teacher's gap as advantage, alone or together with a reward's.

    A = opd_valid w_opd sg(lt - lb) + w_rl A_rl         (ALGORITHMS 2.3, 3.2, 7.2, 7.3)
    lb = student before the step, or of the step itself (`advantage_reference`)

A turn without teacher carries `opd_valid` 0. It never gets the rollout engine's log-probs in the
teacher's place: their gap to the trainer's would pass for an advantage (9 item 5). One turn is one
sample, whether it has a hint, a reward or both. Log-probs in A are at temperature 1, those in the
ratio at the SAMPLE's temperature (1.9). The surrogates are in the modules named below. Shapes: B
rows, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms
from trainer.objectives.distributions.kl import distillation_advantage, kl_estimate, log_ratio
from trainer.objectives.options import HindsightOpd
from trainer.objectives.policy.cispo import cispo
from trainer.objectives.policy.decoupled import (
    DecoupledTerms,
    a3po_proximal_logprobs,
    composed_weights,
    decoupled_ppo,
)
from trainer.objectives.policy.gspo import gspo
from trainer.objectives.policy.opsm import opsm_mask
from trainer.objectives.policy.ppo import PpoTerms, ppo_clip, pure_is

POLICY_GRADIENT_MEANS = frozenset({"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"})


def policy_gradient_terms(batch: TokenBatch, options: HindsightOpd) -> TokenTerms:
    """Loss, advantages and reports per token; `batch` comes from `select_finite`."""
    advantages_BT = advantages(batch, options)
    if options.surrogate in ("decoupled", "a3po"):
        weighted = _decoupled(batch, options, advantages_BT)
        terms, weights_BT = weighted.ppo, weighted.weights
    else:
        terms, weights_BT = _surrogate(batch, options, advantages_BT), None
    loss_BT = terms.loss
    means = {
        "pg_clipfrac": terms.clipped,
        "pg_clipfrac_lower": terms.clipped_lower,
        "ppo_kl": terms.kl,
    }
    if options.opsm_delta is not None:
        kept = opsm_mask(
            batch.logprobs_sampled_BT.detach(),
            batch.old_logprobs_sampled_BT,
            advantages_BT,
            batch.mask_BT,
            delta=options.opsm_delta,
            scope="token" if options.opsm_scope == "token" else "sequence",
            turn_ids_BT=batch.turn_ids_BT,
        )
        loss_BT = loss_BT * kept.keep_BT
        means["opsm_clipfrac"] = kept.share_BT
    means["pg_loss"] = loss_BT.detach()
    gap_BT = _gap(batch, options)
    return TokenTerms(
        loss_BT=loss_BT,
        advantages_BT=advantages_BT,
        gap_BT=gap_BT,
        means=means,
        weights_BT=weights_BT,
    )


@torch.no_grad()
def advantages(batch: TokenBatch, options: HindsightOpd) -> Tensor:
    """A [B, T], detached."""
    taught_BT = teacher_advantages(batch.teacher_logprobs_BT, _base(batch, options), options)
    if options.normalise:
        taught_BT = (taught_BT - batch.statistics.gap_mean) / batch.statistics.gap_std
    return combined_advantages(
        taught_BT,
        torch.zeros_like(taught_BT),
        batch.reward_advantages_BT,
        batch.opd_valid_BT,
        batch.mask_BT,
        opd_coef=options.opd_coef,
        reward_coef=options.reward_coef,
    )


def teacher_advantages(
    teacher_logprobs: Tensor, student_logprobs: Tensor, options: HindsightOpd
) -> Tensor:
    """-D of each token [...], clamped where `options` say so (ALGORITHMS 2.4): the gap for k1."""
    advantages = -kl_estimate(options.estimator, student_logprobs, teacher_logprobs)
    limit = options.loss_max_clamp
    return advantages if limit is None else advantages.clamp(-limit, limit)


def _base(batch: TokenBatch, options: HindsightOpd) -> Tensor:
    """The student in the advantage [B, T], detached."""
    is_old = options.advantage_reference == "old"
    return batch.old_logprobs_BT if is_old else batch.logprobs_BT.detach()


def _gap(batch: TokenBatch, options: HindsightOpd) -> Tensor:
    """Teacher minus student on the sampled tokens [B, T], without coefficient or normalisation."""
    return distillation_advantage(batch.teacher_logprobs_BT, _base(batch, options)) * (
        batch.opd_valid_BT > 0
    )


def _surrogate(batch: TokenBatch, options: HindsightOpd, advantages_BT: Tensor) -> PpoTerms:
    now_BT, old_BT = batch.logprobs_sampled_BT, batch.old_logprobs_sampled_BT
    weights_BT = batch.weights_BT
    if options.surrogate == "ppo":
        return ppo_clip(
            now_BT,
            old_BT,
            advantages_BT,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            weights=weights_BT,
        )
    if options.surrogate == "m2po":
        return ppo_clip(
            now_BT,
            old_BT,
            advantages_BT,
            clip_low=batch.statistics.clip_low,
            clip_high=batch.statistics.clip_high,
            weights=weights_BT,
        )
    if options.surrogate == "cispo":
        return cispo(
            now_BT,
            old_BT,
            advantages_BT,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            weights=weights_BT,
        )
    if options.surrogate in ("gspo", "gspo_sequence"):
        return gspo(
            now_BT,
            old_BT,
            advantages_BT,
            batch.mask_BT,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            form="token" if options.surrogate == "gspo" else "sequence",
            dual_clip=options.dual_clip,
            weights=weights_BT,
            turn_ids_BT=batch.turn_ids_BT,
        )
    if options.surrogate == "unclipped":
        loss_BT = -advantages_BT * torch.exp(log_ratio(now_BT, old_BT)) * weights_BT.detach()
        return _plain(loss_BT, now_BT, old_BT)
    return _plain(pure_is(now_BT, advantages_BT, weights_BT), now_BT, old_BT)


def _decoupled(batch: TokenBatch, options: HindsightOpd, advantages_BT: Tensor) -> DecoupledTerms:
    """The rollout engine is the behaviour policy; a token at which it cannot be compared has weight
    1, or with `engine_cap` that of its age alone.
    """
    now_BT, old_BT = batch.logprobs_sampled_BT, batch.old_logprobs_sampled_BT
    if options.engine_cap is not None:
        assert batch.sampling_logprobs_BT is not None, "prepared, since the options say so"
        weights_BT = composed_weights(
            batch.rollout_logprobs_BT,
            batch.sampling_logprobs_BT,
            old_BT,
            engine_cap=options.engine_cap,
            staleness_cap=options.importance_cap,
        )
        ppo = ppo_clip(
            now_BT,
            old_BT,
            advantages_BT,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            weights=weights_BT,
        )
        return DecoupledTerms(ppo=ppo, weights=weights_BT)
    comparable_BT = torch.isfinite(batch.rollout_logprobs_BT)
    behaviour_BT = torch.where(comparable_BT, batch.rollout_logprobs_BT, old_BT)
    proximal_BT = old_BT
    if options.surrogate == "a3po":
        between_BT = a3po_proximal_logprobs(behaviour_BT, now_BT.detach(), batch.version_gap_BT)
        proximal_BT = torch.where(comparable_BT, between_BT, old_BT)
    return decoupled_ppo(
        now_BT,
        proximal_BT,
        behaviour_BT,
        advantages_BT,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        cap=options.importance_cap,
    )


def _plain(loss_BT: Tensor, now_BT: Tensor, old_BT: Tensor) -> PpoTerms:
    """Reports of a surrogate that clips nothing."""
    log_ratios_BT = log_ratio(now_BT.detach(), old_BT)
    nothing_BT = torch.zeros_like(log_ratios_BT)
    return PpoTerms(
        loss=loss_BT,
        ratio=torch.exp(log_ratios_BT),
        clipped=nothing_BT,
        clipped_lower=nothing_BT,
        kl=-log_ratios_BT,
    )


@torch.no_grad()
def combined_advantages(
    teacher_logprobs_BT: Tensor,
    student_logprobs_BT: Tensor,
    reward_advantages_BT: Tensor,
    opd_valid_BT: Tensor,
    mask_BT: Tensor,
    *,
    opd_coef: float = 1.0,
    reward_coef: float = 1.0,
) -> Tensor:
    """The sum of both advantages [B, T], 0 at mask 0; log-probs at temperature 1.

    The teacher's log-probs where `opd_valid_BT` is 0 (NaN) are ignored. Raises ValueError for a
    flag that is neither 0 nor 1 at a token at mask 1.
    """
    used_BT = mask_BT > 0
    flags = opd_valid_BT[used_BT]
    if bool(((flags != 0) & (flags != 1)).any()):
        raise ValueError("opd_valid must be 0 or 1 at every policy token; 1 where a teacher scored")
    taught_BT = used_BT & (opd_valid_BT > 0)
    zeros_BT = torch.zeros_like(student_logprobs_BT)
    gap_BT = torch.where(taught_BT, teacher_logprobs_BT - student_logprobs_BT, zeros_BT)
    reward_BT = torch.where(used_BT, reward_advantages_BT, zeros_BT)
    return opd_coef * gap_BT + reward_coef * reward_BT


def term_ratio(term: float, coefficient: float, pg_loss: float) -> float:
    """|coefficient x term| / |pg_loss|: above 1 the term dominates (ALGORITHMS 7.4).

    NaN where the policy gradient's loss is 0, as it is in mean at ratio 1 with centred advantages.
    """
    return abs(coefficient * term / pg_loss) if pg_loss != 0 else math.nan
