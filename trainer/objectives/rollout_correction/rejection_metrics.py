"""Metrics of rejection by ratio, by the names of the rollout correction page and of verl 0.9.1.

Formulas: ALGORITHMS 4.6. Shares are of the compared tokens, and of sequences with such a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.rollout_correction.metrics import PREFIX, Metrics, ratio_metrics
from trainer.objectives.rollout_correction.rejection import Rejection
from trainer.objectives.rollout_correction.statistics import (
    fraction,
    largest,
    mean,
    sample_spread,
    smallest,
    spread,
)
from trainer.objectives.rollout_correction.tokens import ComparedTokens
from trainer.objectives.rollout_correction.weights import sequence_ratios, token_ratios


def rejection_metrics(rejections: list[Rejection], tokens: ComparedTokens) -> Metrics:
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
