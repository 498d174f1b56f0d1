"""Log-probabilities of the same token compared: estimators of the KL, the distillation advantage,
and ratios; and what every objective that is a divergence reports.

Formulas: ALGORITHMS 2.1, 2.3, 2.4, 6.1 and 6.10. Functions of two log-probs know no masks and no
reduction; callers select first. An objective's `*_terms` take a `TokenBatch` whose values are
finite and 0 at mask 0 (batch.select_finite) and give 0 where `opd_valid_BT` is 0: a token without a
teacher has nothing to diverge from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from trainer.objectives.batch import Support, TokenBatch, TokenTerms
from trainer.objectives.names import canonical_kl_name
from trainer.objectives.options import SupervisedOpd

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """clip(l - lo, +-20), with the gradient of both where it is not clamped."""
    return torch.clamp(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@torch.no_grad()
def comparable_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """exp(clip(lo - lr, +-20)), 1 where the rollout log-prob is NaN. Both are at the SAMPLE's
    temperature.
    """
    log_ratios = log_ratio(train_logprobs, rollout_logprobs)
    missing = torch.isnan(rollout_logprobs)
    return torch.exp(torch.where(missing, torch.zeros_like(log_ratios), log_ratios))


def at_least_float32(values: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; float32 and float64 as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def kl_estimate(
    name: str, logprobs: Tensor, other_logprobs: Tensor, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimate KL(student || other) per token from d = logprobs - other_logprobs, any shape.

    `name+` has the value of the base and the gradient of k2. `importance_ratio` multiplies the
    value, before k3's last clamp, and carries its own gradient ("unbiased KL").
    """
    base, straight_through = canonical_kl_name(name)
    value = _base_estimate(base, logprobs, other_logprobs)
    if importance_ratio is not None:
        value = value * importance_ratio
    if base == "k3":
        value = torch.clamp(value, -K3_LIMIT, K3_LIMIT)
    if not straight_through:
        return value
    surrogate = 0.5 * (logprobs - other_logprobs).square()
    if importance_ratio is not None:
        surrogate = surrogate * importance_ratio
    return surrogate - surrogate.detach() + value.detach()


def _base_estimate(base: str, logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    if base == "k1":
        return logprobs - other_logprobs
    if base == "abs":
        return (logprobs - other_logprobs).abs()
    if base == "k2":
        return 0.5 * (logprobs - other_logprobs).square()
    log_ratio = torch.clamp(other_logprobs - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log_ratio) - log_ratio - 1.0


def k3_clamped(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """1.0 where k3 is clamped and therefore passes no gradient, else 0.0."""
    log_ratio = torch.clamp(other_logprobs - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((torch.exp(log_ratio) - log_ratio - 1.0) >= K3_LIMIT).to(logprobs.dtype)


def kl_with_ratio(
    kl: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """min(rho k, clip(rho, 1 - clip_low, 1 + clip_high) k), rho = exp(clip(l - lo, +-20)).

    Both `k` (per token, of ALGORITHMS 2.1) and rho carry their gradients. At rho = 1 it is k with
    the gradient of rho k.
    """
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    return torch.minimum(ratio * kl, torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * kl)


def distillation_advantage(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg(log q(a|s + hint) - log pi(a|s)): positive where the teacher likes the token better. Both
    are at temperature 1; neither normalised nor clipped.
    """
    return (teacher_logprobs - student_logprobs).detach()


def supervised_terms(batch: TokenBatch, options: SupervisedOpd) -> TokenTerms:
    """The estimator of KL(student || teacher) on the sampled token (ALGORITHMS 2.1, 2.4)."""
    value_BT = kl_estimate(options.estimator, batch.logprobs_BT, batch.teacher_logprobs_BT)
    means = {"opd/abs_loss": value_BT.abs()}
    if canonical_kl_name(options.estimator)[0] == "k3":
        means["opd/k3_clamped_frac"] = k3_clamped(
            batch.logprobs_BT.detach(), batch.teacher_logprobs_BT
        )
    ranges = {"opd/loss": value_BT}
    return divergence_terms(batch, clamped(value_BT, options.loss_max_clamp), means, ranges)


def divergence_terms(
    batch: TokenBatch,
    loss_BT: Tensor,
    means: dict[str, Tensor],
    ranges: Mapping[str, Tensor] = MappingProxyType({}),
) -> TokenTerms:
    """Values at tokens with a teacher. The gap of the sampled token stands for the advantage."""
    valid_BT = batch.opd_valid_BT
    gap_BT = distillation_advantage(batch.teacher_logprobs_BT, batch.old_logprobs_BT) * valid_BT
    return TokenTerms(
        loss_BT=torch.where(valid_BT > 0, loss_BT, torch.zeros_like(loss_BT)) * valid_BT,
        advantages_BT=gap_BT,
        gap_BT=gap_BT,
        means={name: value.detach() * valid_BT for name, value in means.items()},
        ranges={name: value.detach() for name, value in ranges.items()},
    )


def needed_support(batch: TokenBatch) -> Support:
    """The support of a batch whose objective has one."""
    assert batch.support is not None
    return batch.support


def clamped(values_BT: Tensor, limit: float | None) -> Tensor:
    """Within +-limit; None means off."""
    return values_BT if limit is None else values_BT.clamp(-limit, limit)
