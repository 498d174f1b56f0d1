"""Rejection of tokens and sequences whose ratios lie outside bounds.

Formulas: ALGORITHMS 4.3. Each rule has one statistic: with x the log-ratio, k1 = -x, k2 = x^2/2 and
k3 = exp(x) - 1 - x, all estimates of the divergence of the rollout engine from the trainer, per
token or as sum, mean or maximum over a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.rollout_correction.settings import RejectionRule
from trainer.objectives.rollout_correction.tokens import ComparedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One rule's statistic as each token [N] and each sequence [S] sees it, and what it rejects.

    `by_sequence`: all tokens of a sequence share one value. Otherwise `sequence_S` holds means.
    `low` and `high` are the bounds of the statistic; for k1 [-log upper, -log lower].
    """

    rule: RejectionRule
    token_N: Tensor
    sequence_S: Tensor
    by_sequence: bool
    low: float
    high: float

    @property
    def rejected_N(self) -> Tensor:
        """True where the rule rejects a token, alone or with its sequence."""
        return (self.token_N < self.low) | (self.token_N > self.high)


def reject(tokens: ComparedTokens, rule: RejectionRule, *, clamp_before_sum: bool) -> Rejection:
    """Evaluate one rule on the compared tokens.

    k1 of a sequence clamps the sum or mean of x to +-20, or each x if `clamp_before_sum`; k2 and k3
    clamp each x.
    """
    low, high = -math.inf, rule.upper
    if rule.lower is not None:
        low = -math.log(rule.upper)
        high = -math.log(rule.lower) if rule.lower > 0 else math.inf
    value_N = _estimate(rule.estimator, _clamp(tokens.log_ratio_N))
    if rule.reduction == "token":
        value_S = tokens.mean_by_sequence(value_N)
    else:
        after = rule.bounds_ratio and not clamp_before_sum
        value_S = _reduce(rule.reduction, tokens, -tokens.log_ratio_N if after else value_N)
        value_S = _clamp(value_S) if after else value_S
        value_N = value_S[tokens.sequence_N]
    return Rejection(
        rule=rule,
        token_N=value_N,
        sequence_S=value_S,
        by_sequence=rule.reduction != "token",
        low=low,
        high=high,
    )


def _clamp(values: Tensor) -> Tensor:
    return torch.clamp(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _estimate(estimator: str, log_ratio: Tensor) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def _reduce(reduction: str, tokens: ComparedTokens, values_N: Tensor) -> Tensor:
    if reduction == "seq_sum":
        return tokens.sum_by_sequence(values_N)
    if reduction == "seq_mean":
        return tokens.mean_by_sequence(values_N)
    return tokens.max_by_sequence(values_N)
