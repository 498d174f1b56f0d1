"""Forward KL on the teacher's top-k, with figures that show whether that support is good.

    D = sum over S of e^t (t - s), S = teacher's top-k; then max(D, 0)           (ALGORITHMS 2.5)

No tail and no renormalisation: the truncated sum can be negative. Log-probs are global ones, in at
least float32. It knows no masks over tokens. Shapes: any leading [...], K support.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.objectives.batch import TokenBatch, TokenTerms
from trainer.objectives.distributions.gather import shared_ids
from trainer.objectives.distributions.kl import clamped, divergence_terms, needed_support
from trainer.objectives.distributions.tail_kl import comparable, kl_terms
from trainer.objectives.options import ForwardKlTopk


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
    support = needed_support(batch)
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
