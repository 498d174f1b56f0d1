"""Rules of rejection: which tokens and sequences stay out of the loss because a statistic of their
ratios is out of bounds.

Each rule has one statistic (ALGORITHMS 4.3): with x the log-ratio, k1 = -x, k2 = x^2/2 and k3 =
exp(x) - 1 - x, all estimates of the divergence of the rollout engine from the trainer, per token or
as sum, mean or maximum over a sequence. It knows no weights and no veto.

Shapes: B rows, T tokens; N compared tokens; S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.rollout_correction.ratios import (
    PREFIX,
    ComparedTokens,
    Metrics,
    TokenSelection,
    at_tokens,
    fraction,
    largest,
    mean,
    ratio_metrics,
    sample_spread,
    sequence_ratios,
    smallest,
    spread,
    token_ratios,
)
from trainer.objectives.rollout_correction.settings import RejectionRule


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


def rejected_tokens(
    rejections: Sequence[Rejection], tokens: ComparedTokens, selection: TokenSelection
) -> Tensor:
    """True [B, T] at tokens that a rule rejects, alone or with their sequence."""
    rejected_BT = torch.zeros_like(selection.active_BT)
    for rejection in rejections:
        if rejection.by_sequence:
            rejected_S = rejected_BT.new_zeros(selection.num_sequences)
            rejected_S[tokens.sequence_N[rejection.rejected_N]] = True
            rejected_BT |= at_tokens(rejected_S, selection.sequences_BT)
        else:
            rejected_BT[selection.compared_BT] |= rejection.rejected_N
    return rejected_BT


def rejection_metrics(rejections: Sequence[Rejection], tokens: ComparedTokens) -> Metrics:
    """Of each rule's statistic, `rollout_rs_{rule}_*`, and what all rules together reject.

    With a single rule that bounds the ratio, `rollout_rs_*` also describe that ratio.
    """
    metrics: Metrics = {}
    rejected_N = torch.zeros_like(tokens.sequence_N, dtype=torch.bool)
    for rejection in rejections:
        rejected_N = rejected_N | rejection.rejected_N
        metrics |= {
            f"{PREFIX}rollout_rs_{rejection.rule.statistic}_{name}": value
            for name, value in _statistic_metrics(rejection, tokens).items()
        }
    if len(rejections) == 1 and rejections[0].rule.lower is not None:
        metrics |= {
            f"{PREFIX}rollout_rs_{name}": value
            for name, value in _rejected_ratio_metrics(rejections[0], tokens).items()
        }
    if rejections:
        for name, value in _masked(rejected_N, tokens).items():
            metrics[f"{PREFIX}rollout_rs_{name}"] = value
            metrics[f"{PREFIX}rollout_is_{name}"] = value
    return metrics


def _rejected_ratio_metrics(rejection: Rejection, tokens: ComparedTokens) -> Metrics:
    rule = rejection.rule
    low, high = rule.lower or 0.0, rule.upper
    if rule.reduction == "token":
        ratios = token_ratios(tokens)
    else:
        ratios = sequence_ratios(tokens, geometric=rule.reduction == "seq_mean")
    return ratio_metrics(ratios, ratios, tokens, low=low, high=high, clamp=(low, high))


def _statistic_metrics(rejection: Rejection, tokens: ComparedTokens) -> Metrics:
    value_S = tokens.present(rejection.sequence_S)
    described = value_S if rejection.by_sequence else rejection.token_N
    metrics = {
        "mean": mean(rejection.token_N),
        "max": largest(described),
        "min": smallest(described),
        "std": spread(rejection.token_N.clamp(min=rejection.low, max=rejection.high)),
        "fraction_high": fraction(described > rejection.high),
        "fraction_low": fraction(described < rejection.low),
        "seq_mean": mean(value_S),
        "seq_std": sample_spread(value_S),
        "seq_max": largest(value_S),
        "seq_min": smallest(value_S),
        "seq_max_deviation": largest(value_S.abs()),
        "seq_fraction_high": fraction(value_S > rejection.high),
        "seq_fraction_low": fraction(value_S < rejection.low),
    }
    return metrics | _masked(rejection.rejected_N, tokens)


def _masked(rejected_N: Tensor, tokens: ComparedTokens) -> Metrics:
    touched_S = tokens.sum_by_sequence(rejected_N.to(tokens.train_N.dtype)) > 0
    return {
        "masked_fraction": fraction(rejected_N),
        "seq_masked_fraction": fraction(tokens.present(touched_S)),
    }
