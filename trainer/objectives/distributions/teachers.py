"""Teachers that follow the student: moving averages and trust regions.

    EMA:           teacher <- (1 - rate) teacher + rate student, once per successful step
    trust region:  logits = (1 - alpha) reference + alpha student, both with the hint
                                                                        (ALGORITHMS 2.7)

Whether a step was successful is the caller's to know: a step skipped for its gradient norm skips
the teacher's update as well (ALGORITHMS 0.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.objectives.distributions.gather import at_least_float32


@torch.no_grad()
def ema_update(
    teacher: Tensor | Mapping[str, Tensor], student: Tensor | Mapping[str, Tensor], rate: float
) -> None:
    """Move `teacher` towards `student` by `rate`, in place; a tensor or a state dict by name.

    Values that are not floating point are copied. Keep the teacher in float32: a small rate is
    below bfloat16's resolution. Raises ValueError for a rate outside [0, 1], other names or shapes;
    then nothing was changed.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"the rate of a moving average must be within [0, 1], got {rate}")
    teachers, students = _by_name(teacher), _by_name(student)
    if teachers.keys() != students.keys():
        odd = sorted(teachers.keys() ^ students.keys())
        raise ValueError(f"teacher and student must have the same parameters; only one has {odd}")
    for name, value in teachers.items():
        if value.shape != students[name].shape:
            raise ValueError(
                f"{name or 'the teacher'} has shape {tuple(value.shape)}, the student's has "
                f"{tuple(students[name].shape)}; they must be of one model"
            )
    for name, value in teachers.items():
        if value.is_floating_point():
            value.mul_(1.0 - rate).add_(students[name].to(value), alpha=rate)
        else:
            value.copy_(students[name])


@torch.no_grad()
def trust_region_logits(ref_logits: Tensor, student_logits: Tensor, alpha: float) -> Tensor:
    """Logits [..., V] of the geometric mixture of reference and student, detached.

    In at least float32. Raises ValueError for an `alpha` outside [0, 1] or different shapes.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha of a trust region must be within [0, 1], got {alpha}")
    if ref_logits.shape != student_logits.shape:
        raise ValueError(
            f"reference logits {tuple(ref_logits.shape)} and student logits "
            f"{tuple(student_logits.shape)} must have one shape"
        )
    # At the ends the other side must not matter: 0 x -inf would be NaN.
    if alpha in (0.0, 1.0):
        return at_least_float32(student_logits if alpha else ref_logits).clone()
    return (1.0 - alpha) * at_least_float32(ref_logits) + alpha * at_least_float32(student_logits)


def _by_name(values: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"": values} if isinstance(values, Tensor) else values
