"""Two log-probabilities of the same sampled token compared: estimators of the KL, the distillation
advantage, and the ratio of a KL over several epochs.

Formulas: ALGORITHMS 2.1, 2.3 and 6.10. They know no masks and no reduction; callers select first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.names import canonical_kl_name

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """clip(l - lo, +-20), with the gradient of both where it is not clamped."""
    return torch.clamp(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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
