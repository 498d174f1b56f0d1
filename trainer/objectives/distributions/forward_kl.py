"""Forward KL on the teacher's top-k, with what says whether that support is a good one.

    D = sum over S of e^t (t - s), S = teacher's top-k; then max(D, 0)           (ALGORITHMS 2.5)

No tail and no renormalisation: the truncated sum can be negative. Log-probs are global ones, in at
least float32. It knows no masks over tokens; `forward_kl_metrics` takes one. Shapes: any leading
[...] (metrics: [B, T]), K support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.aggregate import token_weights, weighted_sum
from trainer.objectives.distributions.gather import shared_ids
from trainer.objectives.distributions.tail_kl import comparable, kl_terms


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


@torch.no_grad()
def forward_kl_metrics(
    terms: ForwardKlTerms, mask_BT: Tensor, *, support_size: int
) -> dict[str, Tensor]:
    """Means over tokens at mask 1, and the extremes of the masses; all NaN without such tokens.

    `overlap_ratio` is the mean of overlap_count / `support_size`; `overlap_token_advantage` is the
    mean over tokens with an overlap, 0.0 if no token has one.
    """
    metrics: dict[str, Tensor] = {}
    masses = {"student_mass": terms.student_mass, "teacher_mass": terms.teacher_mass}
    for name, mass_BT in masses.items():
        lowest, highest = _extremes(mass_BT, mask_BT)
        metrics[name] = _mean(mass_BT, mask_BT)
        metrics |= {f"{name}_min": lowest, f"{name}_max": highest}
    if terms.overlap_count is None or terms.overlap_token_advantage is None:
        return metrics
    count_BT = terms.overlap_count.to(mask_BT.dtype)
    overlapping_BT = mask_BT * (count_BT > 0)
    any_overlap = bool((overlapping_BT > 0).any())
    metrics["overlap_ratio"] = _mean(count_BT, mask_BT) / support_size
    # Where no token overlaps, all advantages are 0.0 and so is their mean over the whole mask.
    metrics["overlap_token_advantage"] = _mean(
        terms.overlap_token_advantage, overlapping_BT if any_overlap else mask_BT
    )
    return metrics


def _mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    if not bool((mask_BT > 0).any()):
        return values_BT.new_full((), torch.nan)
    return weighted_sum(values_BT, token_weights(mask_BT, "token-mean"))


def _extremes(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    selected = values_BT[mask_BT > 0]
    if not selected.numel():
        missing = values_BT.new_full((), torch.nan)
        return missing, missing
    return selected.min(), selected.max()
