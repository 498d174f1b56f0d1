"""The KL between student and teacher: estimators on the sampled token, and sums over the teacher's
top-k.

    forward: D = sum over K of e^t (t - s); then max(D, 0)                       (ALGORITHMS 2.5)
    reverse: D = sum over K + 1 of e^a (a - b), a = tail(s), b = tail(t)         (ALGORITHMS 2.6)
    tail(x): z = min(logsumexp(x), -1e-7); append log(-expm1(z))

The forward sum has no tail and no renormalisation, so it can be negative. The gradient of the
reverse one flows through all of a, the tail too. Teachers are detached; log-probs are global ones,
in at least float32. Ratios and the distillation advantage stand here too, because they compare the
same two log-probs.

Formulas: ALGORITHMS 2.1 to 2.6, 6.1 and 6.10. Functions of log-probs know no masks and no
reduction; callers select first. An objective's `*_terms` take a `TokenBatch` whose values are
finite and 0 at mask 0 (`select_finite`) and give 0 where `opd_valid_BT` is 0: a token without a
teacher has nothing to diverge from.

Shapes: any leading [...], K support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from trainer.objectives.batch import Support, TokenBatch, TokenTerms
from trainer.objectives.distributions.gather import shared_ids
from trainer.objectives.names import KlEstimator, KlRatio, canonical_kl_name
from trainer.objectives.options import ForwardKlTopk, SupervisedOpd, TopkTailReverseKl

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
    estimator: str | KlEstimator,
    logprobs: Tensor,
    other_logprobs: Tensor,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Estimate KL(student || other) per token from d = logprobs - other_logprobs, any shape.

    An estimator with a + has the value of its base and the gradient of k2. `importance_ratio`
    multiplies the value, before k3's last clamp, and carries its own gradient ("unbiased KL").
    """
    if isinstance(estimator, str):
        estimator = canonical_kl_name(estimator)
    value = _base_estimate(estimator.base, logprobs, other_logprobs)
    if importance_ratio is not None:
        value = value * importance_ratio
    if estimator.base == "k3":
        value = torch.clamp(value, -K3_LIMIT, K3_LIMIT)
    if not estimator.straight_through:
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


def kl_to_start(
    clean: TokenBatch,
    estimator: KlEstimator,
    ratio: KlRatio,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The KL to the frozen start per token at temperature 1. Its own ratio, if it has one, is at
    the sample's temperature.
    """
    assert clean.reference_logprobs_BT is not None
    if ratio == "clipped":
        kl_BT = kl_estimate(estimator, clean.logprobs_BT, clean.reference_logprobs_BT)
        return kl_with_ratio(
            kl_BT,
            clean.logprobs_sampled_BT,
            clean.old_logprobs_sampled_BT,
            clip_low=clip_low,
            clip_high=clip_high,
        )
    ratio_BT = None
    if ratio == "unbiased":
        gap_BT = clean.logprobs_sampled_BT - clean.old_logprobs_sampled_BT
        ratio_BT = torch.exp(gap_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return kl_estimate(estimator, clean.logprobs_BT, clean.reference_logprobs_BT, ratio_BT)


def distillation_advantage(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg(log q(a|s + hint) - log pi(a|s)): positive where the teacher likes the token better. Both
    are at temperature 1; neither normalised nor clipped.
    """
    return (teacher_logprobs - student_logprobs).detach()


def supervised_terms(batch: TokenBatch, options: SupervisedOpd) -> TokenTerms:
    """The estimator of KL(student || teacher) on the sampled token (ALGORITHMS 2.1, 2.4)."""
    value_BT = kl_estimate(options.estimator, batch.logprobs_BT, batch.teacher_logprobs_BT)
    means = {"opd/abs_loss": value_BT.abs()}
    if canonical_kl_name(options.estimator).base == "k3":
        means["opd/k3_clamped_frac"] = k3_clamped(
            batch.logprobs_BT.detach(), batch.teacher_logprobs_BT
        )
    ranges = {"opd/loss": value_BT}
    loss_BT = options.opd_coef * clamped(value_BT, options.loss_max_clamp)
    return divergence_terms(batch, loss_BT, means, ranges)


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


def needed_support(batch: TokenBatch, objective: str) -> Support:
    """The support of a batch whose objective has one. Raises ValueError if it is absent."""
    if batch.support is None:
        raise ValueError(f"objective {objective!r} needs a support at every position")
    return batch.support


def clamped(values_BT: Tensor, limit: float | None) -> Tensor:
    """Within +-limit; None means off."""
    return values_BT if limit is None else values_BT.clamp(-limit, limit)


TAIL_CEILING = -1e-7
"""Largest log-mass of a support: above it the rest would be log(0) or worse by rounding."""
ABSENT = -1e30
"""Log-prob of what has no probability on either side: exp gives 0, differences stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailKlTerms:
    """Per token [...]; `student_tail` and `teacher_tail` are the detached log-masses outside the
    support.
    """

    kl: Tensor
    student_tail: Tensor
    teacher_tail: Tensor


def topk_tail_reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    valid: Tensor | None = None,
) -> TailKlTerms:
    """KL(student || teacher) over K tokens and the rest; global log-probs [..., K].

    `valid`: see `comparable`. Raises ValueError for shapes that differ.
    """
    student, teacher = comparable(student_logprobs, teacher_logprobs, valid)
    student, teacher = with_tail(student), with_tail(teacher)
    return TailKlTerms(
        kl=kl_terms(student, teacher).sum(dim=-1),
        student_tail=student[..., -1].detach(),
        teacher_tail=teacher[..., -1],
    )


def tail_logprob(logprobs: Tensor) -> Tensor:
    """Log of the probability [...] outside a support of log-probs [..., K], with gradient."""
    mass = torch.logsumexp(logprobs, dim=-1).clamp(max=TAIL_CEILING)
    return torch.log(-torch.expm1(mass))


def with_tail(logprobs: Tensor) -> Tensor:
    """[..., K] -> [..., K + 1]: the support and the bucket of the rest, which sum to one."""
    return torch.cat([logprobs, tail_logprob(logprobs).unsqueeze(-1)], dim=-1)


def comparable(
    student_logprobs: Tensor, teacher_logprobs: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both in at least float32, the teacher detached, without weight where neither has any.

    Those are tokens impossible on both sides (a padded vocabulary), and places where `valid` is 0:
    [..., K] for the empty ones of a support, [..., 1] for tokens at mask 0. Whatever the latter
    contain, even NaN, reaches neither value nor gradient. Raises ValueError for shapes that differ.
    """
    shape = student_logprobs.shape
    if teacher_logprobs.shape != shape or (
        valid is not None and valid.shape not in (shape, (*shape[:-1], 1))
    ):
        raise ValueError(
            f"student, teacher and valid must have one shape [..., K], got {tuple(shape)}, "
            f"{tuple(teacher_logprobs.shape)}, {None if valid is None else tuple(valid.shape)}"
        )
    student = at_least_float32(student_logprobs)
    teacher = at_least_float32(teacher_logprobs.detach())
    absent = (student == -torch.inf) & (teacher == -torch.inf)
    if valid is not None:
        absent = absent | (valid <= 0)
    return student.masked_fill(absent, ABSENT), teacher.masked_fill(absent, ABSENT)


def kl_terms(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """e^p (p - q) per element, 0 with gradient 0 where p is -inf; their sum is KL(p || q)."""
    impossible = logprobs == -torch.inf
    logprobs = logprobs.masked_fill(impossible, ABSENT)
    other_logprobs = other_logprobs.masked_fill(impossible, ABSENT)
    return torch.exp(logprobs) * (logprobs - other_logprobs)


def tail_kl_terms(batch: TokenBatch, options: TopkTailReverseKl) -> TokenTerms:
    """KL(student || teacher) on the teacher's top-k and the rest (ALGORITHMS 2.6)."""
    support = needed_support(batch, options.name)
    result = topk_tail_reverse_kl(support.student_BTK, support.teacher_BTK, valid=support.valid_BTK)
    means = {
        "opd/student_tail": result.student_tail.exp(),
        "opd/teacher_tail": result.teacher_tail.exp(),
    }
    ranges = {"opd/loss": result.kl}
    return divergence_terms(batch, clamped(result.kl, options.loss_max_clamp), means, ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKlTerms:
    """Per token [...]; every field but `loss` is detached.

    Masses are of the support before any clamp. `overlap_token_advantage` is the mean of
    -e^t (t - s) over tokens that both sides have in their top-k, 0.0 where `overlap_count` is 0;
    the two are None without ids.
    """

    loss: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
    overlap_count: Tensor | None
    overlap_token_advantage: Tensor | None


def forward_kl_topk(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    student_topk_ids: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    log_prob_min_clamp: float | None = None,
    *,
    valid: Tensor | None = None,
    clamp_negative: bool = True,
) -> ForwardKlTerms:
    """KL(teacher || student) over the teacher's top-k `teacher_ids` [..., K]; log-probs [..., K].

    `log_prob_min_clamp` bounds both log-probs from below; every student log-prob under it loses its
    gradient. `clamp_negative` is the last step, max(D, 0). `valid`: see `comparable`. Raises
    ValueError for shapes that differ, or one set of ids without the other.
    """
    if (student_topk_ids is None) != (teacher_ids is None):
        raise ValueError("overlap needs both student_topk_ids and teacher_ids; give both or none")
    student, teacher = comparable(student_logprobs, teacher_logprobs, valid)
    student_mass = student.detach().exp().sum(dim=-1)
    teacher_mass = teacher.exp().sum(dim=-1)
    if log_prob_min_clamp is not None:
        student = student.clamp(min=log_prob_min_clamp)
        teacher = teacher.clamp(min=log_prob_min_clamp)
    terms = kl_terms(teacher, student)
    if valid is not None:
        terms = terms.masked_fill(valid <= 0, 0.0)
    loss = terms.sum(dim=-1)
    count = advantage = None
    if teacher_ids is not None and student_topk_ids is not None:
        shared = shared_ids(teacher_ids, student_topk_ids)
        if valid is not None:
            shared = shared & (valid > 0)
        count = shared.sum(dim=-1)
        total = terms.detach().masked_fill(~shared, 0.0).sum(dim=-1)
        advantage = -total / count.clamp(min=1)
    return ForwardKlTerms(
        loss=loss.clamp(min=0.0) if clamp_negative else loss,
        student_mass=student_mass,
        teacher_mass=teacher_mass,
        overlap_count=count,
        overlap_token_advantage=advantage,
    )


def forward_kl_terms(batch: TokenBatch, options: ForwardKlTopk) -> TokenTerms:
    """KL(teacher || student) on the teacher's top-k, not below 0 (ALGORITHMS 2.5)."""
    support = needed_support(batch, options.name)
    result = forward_kl_topk(
        support.student_BTK,
        support.teacher_BTK,
        support.student_topk_ids_BTK,
        None if support.student_topk_ids_BTK is None else support.ids_BTK,
        options.log_prob_min_clamp,
        valid=support.valid_BTK,
    )
    means = {"opd/student_mass": result.student_mass, "opd/teacher_mass": result.teacher_mass}
    if result.overlap_count is not None and result.overlap_token_advantage is not None:
        size = support.ids_BTK.shape[-1]
        means["opd/overlap_ratio"] = result.overlap_count.to(batch.mask_BT.dtype) / size
        # The batch divides the second by the third: a mean over tokens that share something.
        means["opd/overlap_token_advantage"] = result.overlap_token_advantage
        means["opd/overlapping_frac"] = (result.overlap_count > 0).to(batch.mask_BT.dtype)
    ranges = {
        "opd/loss": result.loss,
        "opd/student_mass": result.student_mass,
        "opd/teacher_mass": result.teacher_mass,
    }
    return divergence_terms(batch, clamped(result.loss, options.loss_max_clamp), means, ranges)
