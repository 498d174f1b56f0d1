"""The distillation advantage of each token: teacher minus student, detached.

Formula: ALGORITHMS 2.3. Both log-probabilities are at temperature 1. Not normalised, not clipped.
"""

from __future__ import annotations

from torch import Tensor


def distillation_advantage(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sg(log q(a|s + hint) - log pi(a|s)): positive where the teacher likes the token better."""
    return (teacher_logprobs - student_logprobs).detach()
