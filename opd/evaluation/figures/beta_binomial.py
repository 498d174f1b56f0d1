"""Problems whose success probabilities differ: p ~ Beta(a, b), c ~ Binomial(n, p).

    E pass@k = 1 - G(b+k) G(a+b) / (G(b) G(a+b+k))                                (ALGORITHMS 8.2)

The fitted model extrapolates to k beyond the tries made, where the plug-in estimate saturates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Counts = Sequence[tuple[int, int]]
"""(c, n) per problem: successes and tries."""
_LOG_LIMIT = 12.0
_TOLERANCE = 1e-10
_MAX_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaBinomial:
    """Beta(alpha, beta), both positive."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf and 0 < self.beta < math.inf):
            raise ValueError(f"alpha and beta must be positive, got {self.alpha} and {self.beta}")

    def pass_at_k(self, k: int) -> float:
        """The expected probability that one of k tries succeeds. ValueError unless k >= 0."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        log_missed = (
            math.lgamma(self.beta + k)
            - math.lgamma(self.beta)
            + math.lgamma(self.alpha + self.beta)
            - math.lgamma(self.alpha + self.beta + k)
        )
        return -math.expm1(log_missed)

    def posterior(self, c: int, n: int) -> BetaBinomial:
        """The posterior of one problem with c successes in n tries: Beta(a + c, b + n - c)."""
        _check_count(c, n)
        return BetaBinomial(alpha=self.alpha + c, beta=self.beta + n - c)

    def log_likelihood(self, counts: Counts) -> float:
        """The natural logarithm of the counts' probability, binomial coefficients included."""
        logs = torch.tensor([math.log(self.alpha), math.log(self.beta)], dtype=torch.float64)
        successes, tries = _tensors(counts)
        return float(_log_kernel(logs, successes, tries)) + _log_choose(successes, tries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The maximum-likelihood model. `converged` is False if the likelihood has no maximum inside
    the searched range (every problem equally hard, or all tries failed or all succeeded).
    """

    model: BetaBinomial
    log_likelihood: float
    converged: bool


def fit_beta_binomial(counts: Counts) -> Fit:
    """Fit (alpha, beta) to (c, n) of problems by damped Newton steps on their logarithms.

    Deterministic; alpha and beta stay within e^-12 and e^12. Raises ValueError for no problems or
    impossible counts.
    """
    successes, tries = _tensors(counts)
    rate = float(((successes.sum() + 0.5) / (tries.sum() + 1.0)).clamp(1e-3, 1.0 - 1e-3))
    logs = torch.tensor([math.log(rate), math.log(1.0 - rate)], dtype=torch.float64)
    value, gradient, hessian = _derivatives(logs, successes, tries)
    for _ in range(_MAX_STEPS):
        if float(gradient.abs().max()) < _TOLERANCE * len(counts):
            break
        step = _ascent_step(gradient, hessian)
        accepted = _line_search(logs, value, step, successes, tries)
        if accepted is None:
            break
        logs = accepted
        value, gradient, hessian = _derivatives(logs, successes, tries)
    inside = bool((logs.abs() < _LOG_LIMIT).all())
    flat = float(gradient.abs().max()) < 1e-6 * len(counts)
    alpha, beta = (float(x) for x in logs.exp())
    model = BetaBinomial(alpha=alpha, beta=beta)
    return Fit(model=model, log_likelihood=model.log_likelihood(counts), converged=inside and flat)


def _log_kernel(logs: Tensor, successes: Tensor, tries: Tensor) -> Tensor:
    alpha, beta = logs.exp()
    return (
        torch.lgamma(alpha + successes)
        + torch.lgamma(beta + tries - successes)
        - torch.lgamma(alpha + beta + tries)
        - torch.lgamma(alpha)
        - torch.lgamma(beta)
        + torch.lgamma(alpha + beta)
    ).sum()


def _derivatives(logs: Tensor, successes: Tensor, tries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-likelihood without binomial coefficients, its gradient [2] and Hessian [2, 2]."""
    alpha, beta = logs.exp()
    both = torch.digamma(alpha + beta) - torch.digamma(alpha + beta + tries)
    slope = torch.stack(
        [
            (torch.digamma(alpha + successes) - torch.digamma(alpha) + both).sum(),
            (torch.digamma(beta + tries - successes) - torch.digamma(beta) + both).sum(),
        ]
    )
    mixed = (_trigamma(alpha + beta) - _trigamma(alpha + beta + tries)).sum()
    curve = torch.stack(
        [
            (_trigamma(alpha + successes) - _trigamma(alpha)).sum() + mixed,
            (_trigamma(beta + tries - successes) - _trigamma(beta)).sum() + mixed,
        ]
    )
    scale = logs.exp()
    hessian = torch.outer(scale, scale) * mixed
    # The chain rule for x = e^t: x^2 f'' + x f'.
    hessian = hessian - torch.diag(hessian.diag()) + torch.diag(scale**2 * curve + scale * slope)
    return _log_kernel(logs, successes, tries), scale * slope, hessian


def _trigamma(values: Tensor) -> Tensor:
    return torch.polygamma(1, values)


def _ascent_step(gradient: Tensor, hessian: Tensor) -> Tensor:
    """Newton's step with the Hessian's eigenvalues made negative, at most 2 long per coordinate."""
    values, vectors = torch.linalg.eigh(hessian)
    curvature = values.abs().clamp(min=1e-8)
    step = vectors @ ((vectors.T @ gradient) / curvature)
    return step * min(1.0, 2.0 / max(float(step.abs().max()), 1e-300))


def _line_search(
    logs: Tensor, value: Tensor, step: Tensor, successes: Tensor, tries: Tensor
) -> Tensor | None:
    """The first of successively halved steps that does not lower the likelihood; None if none
    moves.
    """
    for halvings in range(40):
        candidate = (logs + step * 0.5**halvings).clamp(-_LOG_LIMIT, _LOG_LIMIT)
        if torch.equal(candidate, logs):
            return None
        if float(_log_kernel(candidate, successes, tries)) >= float(value):
            return candidate
    return None


def _tensors(counts: Counts) -> tuple[Tensor, Tensor]:
    if not counts:
        raise ValueError("a model of no problems cannot be fitted; give (c, n) of at least one")
    for c, n in counts:
        _check_count(c, n)
    table = torch.tensor(counts, dtype=torch.float64)
    return table[:, 0], table[:, 1]


def _log_choose(successes: Tensor, tries: Tensor) -> float:
    ones = (
        torch.lgamma(tries + 1) - torch.lgamma(successes + 1) - torch.lgamma(tries - successes + 1)
    )
    return float(ones.sum())


def _check_count(c: int, n: int) -> None:
    if n < 1 or not 0 <= c <= n:
        raise ValueError(f"counts must have n >= 1 and 0 <= c <= n, got c={c}, n={n}")
