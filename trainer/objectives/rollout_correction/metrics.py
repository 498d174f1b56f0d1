"""Metrics of ratios and of weights, by the names of the rollout correction page.

Formulas: ALGORITHMS 4.6. Sequences without a compared token are not counted. Metrics of weights are
taken after truncation; those before it have the suffix `_raw`. Every value is a tensor without
dimensions, so that the caller moves all of them at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.rollout_correction.settings import RolloutCorrectionSettings
from trainer.objectives.rollout_correction.tokens import ComparedTokens
from trainer.objectives.rollout_correction.weights import (
    Ratios,
    clamped_exp,
    effective_share,
    fraction,
    largest,
    mean,
    quantile,
    sample_spread,
    sequence_ratios,
    smallest,
    spread,
)

Metrics = dict[str, Tensor]
PREFIX = "rollout_corr/"
_LARGEST_EXPONENT = 700.0


def off_policy_metrics(tokens: ComparedTokens) -> Metrics:
    """How far trainer and rollout engine are apart, whatever is corrected.

    `kl` takes log-ratios as they are; metrics that exponentiate them clamp first.
    """
    train_S = tokens.present(tokens.mean_by_sequence(tokens.train_N))
    rollout_S = tokens.present(tokens.mean_by_sequence(tokens.rollout_N))
    log_ratio_N = tokens.log_ratio_N
    clamped_N = torch.clamp(log_ratio_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    product_S = tokens.present(sequence_ratios(tokens).sequence_S)
    gap_S = rollout_S - train_S
    values = {
        "training_ppl": mean(_exp(-train_S)),
        "training_log_ppl": mean(-train_S),
        "rollout_ppl": mean(_exp(-rollout_S)),
        "rollout_log_ppl": mean(-rollout_S),
        "log_ppl_diff": mean(gap_S),
        "log_ppl_abs_diff": mean(gap_S.abs()),
        "log_ppl_diff_max": largest(gap_S),
        "log_ppl_diff_min": smallest(gap_S),
        "ppl_ratio": mean(_exp(gap_S)),
        "kl": mean(-log_ratio_N),
        "k3_kl": mean(torch.expm1(clamped_N) - clamped_N),
        "chi2_token": mean(clamped_exp(log_ratio_N).square()) - 1.0,
        "chi2_seq": mean(product_S.square()) - 1.0,
        "ratio_p99": quantile(clamped_exp(log_ratio_N), 0.99),
    }
    return {PREFIX + name: value for name, value in values.items()}


def fresh_metrics(tokens: ComparedTokens, is_fresh_N: Tensor) -> Metrics:
    """`kl` over the tokens that the newest weights sampled; NaN without any."""
    return {PREFIX + "kl_fresh": mean(-tokens.log_ratio_N[is_fresh_N])}


def weight_metrics(
    raw: Ratios, applied: Ratios, tokens: ComparedTokens, settings: RolloutCorrectionSettings
) -> Metrics:
    """Of weights before normalisation by the batch: `rollout_is_*` and `rollout_is_*_raw`.

    Deviation and effective sample size clamp to [0, upper], and before truncation to [1/upper,
    upper]; unclamped ones have the suffix `_unclamped`: within the bounds neither can show that
    weights run away. `oob_ratio` is the share of tokens outside both bounds, where there are two.
    """
    low, high = settings.low_bound, settings.importance_upper
    floor = 1.0 / settings.importance_upper
    before = ratio_metrics(raw, raw, tokens, low=low, high=high, clamp=(floor, high))
    after = ratio_metrics(applied, raw, tokens, low=low, high=high, clamp=(0.0, high))
    metrics = {f"{PREFIX}rollout_is_{name}": value for name, value in after.items()}
    metrics |= {f"{PREFIX}rollout_is_{name}_raw": value for name, value in before.items()}
    metrics[f"{PREFIX}rollout_is_std_unclamped"] = spread(raw.token_N)
    metrics[f"{PREFIX}rollout_is_eff_sample_size_unclamped"] = effective_share(raw.token_N)
    if settings.importance_lower is not None:
        outside_N = (raw.token_N < low) | (raw.token_N > high)
        metrics[f"{PREFIX}rollout_is_oob_ratio"] = fraction(outside_N)
    return metrics


def ratio_metrics(
    values: Ratios,
    raw: Ratios,
    tokens: ComparedTokens,
    *,
    low: float,
    high: float,
    clamp: tuple[float, float],
) -> Metrics:
    """Statistics of ratios over tokens and over sequences, without a prefix.

    `values` are described; `raw`, the ratios before any bound, decide what is out of bounds.
    `clamp` bounds what deviation and effective sample size see.
    """
    value_S = tokens.present(values.sequence_S)
    raw_S = tokens.present(raw.sequence_S)
    clamped_N = values.token_N.clamp(min=clamp[0], max=clamp[1])
    over_S, under_S = raw_S > high, raw_S < low
    over, under = raw.token_N > high, raw.token_N < low
    maximum, minimum = largest(values.token_N), smallest(values.token_N)
    if raw.log_S is not None:
        log_S = tokens.present(raw.log_S)
        over_S, under_S = log_S > math.log(high), log_S < (math.log(low) if low > 0 else -math.inf)
        over, under = over_S, under_S
        maximum = torch.exp(largest(log_S).clamp(max=LOG_RATIO_LIMIT))
        minimum = _exp(smallest(log_S))
    return {
        "mean": mean(values.token_N),
        "std": spread(clamped_N),
        "min": minimum,
        "max": maximum,
        "eff_sample_size": effective_share(clamped_N),
        "ratio_fraction_high": fraction(over),
        "ratio_fraction_low": fraction(under),
        "seq_mean": mean(value_S),
        "seq_std": sample_spread(value_S),
        "seq_max": largest(value_S),
        "seq_min": smallest(value_S),
        "seq_max_deviation": largest((value_S - 1.0).abs()),
        "seq_fraction_high": fraction(over_S),
        "seq_fraction_low": fraction(under_S),
    }


def tool_metrics(tokens: ComparedTokens, after_tool_N: Tensor) -> Metrics:
    """Ratios of tokens after tool output, and of the others (ALGORITHMS 6.8)."""
    ratio_N = clamped_exp(tokens.log_ratio_N)
    metrics: Metrics = {}
    for group, chosen_N in (("post_tool", after_tool_N), ("other", ~after_tool_N)):
        ratio, log_ratio = ratio_N[chosen_N], tokens.log_ratio_N[chosen_N]
        values = {
            "mean": mean(ratio),
            "std": spread(ratio),
            "p99": quantile(ratio, 0.99),
            "max": largest(ratio),
            "kl": mean(-log_ratio),
            "token_fraction": fraction(chosen_N),
        }
        metrics |= {f"{PREFIX}{group}/{name}": value for name, value in values.items()}
    return metrics


def _exp(values: Tensor) -> Tensor:
    """exp in float64 and finite, for logarithms of perplexities and products of ratios."""
    return torch.exp(values.to(torch.float64).clamp(max=_LARGEST_EXPONENT))
