"""Importance weights per token or per sequence, truncated or bounded, and normalised.

Formulas: ALGORITHMS 4.1 and 4.2; for the statistics of flat values, which are NaN without any,
ALGORITHMS 0 and 4.6. Weights are detached by construction: nothing here has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.rollout_correction.settings import Level, RolloutCorrectionSettings
from trainer.objectives.rollout_correction.tokens import ComparedTokens

_SMALLEST_MEAN = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Ratios as each token [N] and as each sequence [S] sees them.

    `by_sequence`: all tokens of a sequence share one ratio, and `log_S` is its logarithm, not
    clamped. Otherwise `sequence_S` is the mean of a sequence's ratios and `log_S` None.
    """

    token_N: Tensor
    sequence_S: Tensor
    log_S: Tensor | None

    @property
    def by_sequence(self) -> bool:
        return self.log_S is not None


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clip(x, +-20))."""
    return torch.exp(torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def token_ratios(tokens: ComparedTokens) -> Ratios:
    """exp(clip(x))."""
    ratio_N = clamped_exp(tokens.log_ratio_N)
    return Ratios(token_N=ratio_N, sequence_S=tokens.mean_by_sequence(ratio_N), log_S=None)


def sequence_ratios(tokens: ComparedTokens, *, geometric: bool = False) -> Ratios:
    """exp(clip(sum of x)), or of the mean of x."""
    log_S = (tokens.mean_by_sequence if geometric else tokens.sum_by_sequence)(tokens.log_ratio_N)
    ratio_S = clamped_exp(log_S)
    return Ratios(token_N=ratio_S[tokens.sequence_N], sequence_S=ratio_S, log_S=log_S)


def raw_ratios(tokens: ComparedTokens, level: Level) -> Ratios:
    """The ratios that weights of this level begin with."""
    return token_ratios(tokens) if level == "token" else sequence_ratios(tokens)


def applied_weights(
    raw: Ratios,
    tokens: ComparedTokens,
    settings: RolloutCorrectionSettings,
    after_tool_N: Tensor | None = None,
) -> Ratios:
    """Truncated to the upper bound; 0 outside both bounds; or as they are in mask mode.

    Where `after_tool_N` is true the upper bound is `post_tool_upper`, if there is one; a sequence
    with such a token has that bound as a whole.
    """
    upper_N, upper_S = _upper_bounds(raw, tokens, settings, after_tool_N)

    def apply(ratio: Tensor, upper: Tensor) -> Tensor:
        if settings.is_mask_mode:
            return ratio
        if settings.importance_lower is None:
            return torch.minimum(ratio, upper)
        inside = (ratio >= settings.importance_lower) & (ratio <= upper)
        return torch.where(inside, ratio, torch.zeros_like(ratio))

    weight_N = apply(raw.token_N, upper_N)
    if raw.by_sequence:
        return Ratios(token_N=weight_N, sequence_S=apply(raw.sequence_S, upper_S), log_S=raw.log_S)
    return Ratios(token_N=weight_N, sequence_S=tokens.mean_by_sequence(weight_N), log_S=None)


def _upper_bounds(
    raw: Ratios,
    tokens: ComparedTokens,
    settings: RolloutCorrectionSettings,
    after_tool_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The upper bound of the weight of each token [N] and of each sequence [S]."""
    upper_N = torch.full_like(raw.token_N, settings.importance_upper)
    upper_S = torch.full_like(raw.sequence_S, settings.importance_upper)
    if settings.post_tool_upper is None or after_tool_N is None:
        return upper_N, upper_S
    upper_N[after_tool_N] = settings.post_tool_upper
    upper_S[tokens.sequence_N[after_tool_N]] = settings.post_tool_upper
    return (upper_S[tokens.sequence_N] if raw.by_sequence else upper_N), upper_S


def batch_norm_factor(weights: Ratios, tokens: ComparedTokens) -> Tensor:
    """What to divide weights by: their mean over tokens, or over sequences for weights of those.

    1 where the mean is not above 1e-8, NaN where there are no weights. The batch is the one given
    here, so it has to be the global one.
    """
    values = tokens.present(weights.sequence_S) if weights.by_sequence else weights.token_N
    factor = mean(values)
    return torch.where(factor <= _SMALLEST_MEAN, torch.ones_like(factor), factor)


_EPSILON = 1e-8


def mean(values: Tensor) -> Tensor:
    """sum / (count + 1e-8)."""
    if values.numel() == 0:
        return _missing(values)
    return values.sum() / (values.numel() + _EPSILON)


def fraction(chosen: Tensor) -> Tensor:
    """Share of true entries."""
    return chosen.double().mean() if chosen.numel() else _missing(chosen.double())


def largest(values: Tensor) -> Tensor:
    """Maximum."""
    return values.max() if values.numel() else _missing(values)


def smallest(values: Tensor) -> Tensor:
    """Minimum."""
    return values.min() if values.numel() else _missing(values)


def spread(values: Tensor) -> Tensor:
    """Standard deviation of exactly these values, not of a sample."""
    if values.numel() == 0:
        return _missing(values)
    # Centred first: mean(v^2) - mean(v)^2 cancels for weights close to 1.
    return (values - values.mean()).square().mean().sqrt()


def sample_spread(values: Tensor) -> Tensor:
    """Unbiased standard deviation; 0 for one value."""
    if values.numel() == 0:
        return _missing(values)
    return values.std() if values.numel() > 1 else values.new_zeros(())


def effective_share(weights: Tensor) -> Tensor:
    """Effective sample size as a share of the sample: 1 / mean((w / mean(w))^2); 0 if all are 0."""
    share = 1.0 / mean((weights / (mean(weights) + _EPSILON)).square())
    return torch.where(torch.isinf(share), torch.zeros_like(share), share)


def quantile(values: Tensor, share: float) -> Tensor:
    """The smallest value that at least `share` of the values do not exceed."""
    if values.numel() == 0:
        return _missing(values)
    # torch.quantile refuses more than 2^24 values.
    rank = min(max(math.ceil(share * values.numel()), 1), values.numel())
    return values.kthvalue(rank).values


def _missing(values: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=values.dtype, device=values.device)
