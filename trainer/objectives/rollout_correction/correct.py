"""Rollout correction of a batch: weights, mask, metrics and warnings in one call.

Facts: ALGORITHMS 4 and 0.1. It needs log-probs of the whole batch only, so it is called once for
all micro-batches: mean and metrics are then those of the global batch. It does not know losses.
Each rule of rejection has one statistic (4.3): with x the log-ratio, k1 = -x, k2 = x^2/2 and k3 =
exp(x) - 1 - x, all estimates of the divergence of the rollout engine from the trainer, per token or
as sum, mean or maximum over a sequence. A veto is one token's against its whole sequence (4.4).

Shapes: B rows, T tokens; N compared tokens; S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.distributions.kl import LOG_RATIO_LIMIT
from trainer.objectives.rollout_correction.ratios import (
    PREFIX,
    ComparedTokens,
    Metrics,
    TokenSelection,
    compare,
    comparison_metrics,
    fraction,
    largest,
    mean,
    ratio_metrics,
    sample_spread,
    sequence_ratios,
    smallest,
    spread,
    token_ratios,
    weigh,
)
from trainer.objectives.rollout_correction.settings import (
    RejectionRule,
    RolloutCorrectionSettings,
    health_warnings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionResult:
    """All detached. `weights_BT` is 0 at mask 0 of the input and None where the settings apply no
    weights; `mask_BT` is the input's without what was rejected. `metrics` are plain numbers, NaN
    where there is nothing to measure.
    """

    weights_BT: Tensor | None
    mask_BT: Tensor
    metrics: dict[str, float]
    warnings: tuple[str, ...]


@torch.no_grad()
def correct_rollout(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    settings: RolloutCorrectionSettings,
    turn_ids_BT: Tensor | None = None,
    *,
    after_tool_BT: Tensor | None = None,
    fresh_BT: Tensor | None = None,
) -> CorrectionResult:
    """Correct samples of the rollout engine; all tensors [B, T], log-probs of the sampled tokens at
    the sample's temperature. `settings.traits.train_logprobs` says which ones to pass.

    With turn ids (-1: no policy token) a sequence is a turn, else a row. `after_tool_BT` is 1 at
    tokens after tool output: it adds metrics for them and for the others, and `post_tool_upper`
    bounds their weights. `fresh_BT` is 1 at tokens that the newest weights sampled (None: all), for
    `kl_fresh`.

    At mask 1, a rollout log-prob of NaN means "not comparable": weight 1, in no metric and in no
    statistic, but it vetoes its sequence where a veto is set. An infinite one rejects its sequence.
    A trainer log-prob that is not finite drops its token. Both are counted under `guard/`, and so
    is a batch with nothing left. Raises ValueError for shapes that differ and for a token at mask 1
    without turn id.
    """
    others = {"rollout_logprobs": rollout_logprobs_BT, "mask": mask_BT}
    others |= {"turn_ids": turn_ids_BT, "after_tool": after_tool_BT, "fresh": fresh_BT}
    _check_shapes(train_logprobs_BT, others)
    selection, tokens = compare(train_logprobs_BT, rollout_logprobs_BT, mask_BT, turn_ids_BT)
    if selection.num_sequences == 0:
        return _empty(mask_BT, settings)
    is_fresh_BT = selection.compared_BT if fresh_BT is None else fresh_BT > 0
    after_tool_N = None if after_tool_BT is None else after_tool_BT[selection.compared_BT] > 0
    metrics = comparison_metrics(tokens, is_fresh_BT[selection.compared_BT], after_tool_N)
    weights_BT, weight_report = weigh(tokens, selection, after_tool_N, settings)
    rejections = [
        reject(tokens, rule, clamp_before_sum=settings.clamp_before_sum)
        for rule in settings.rejections
    ]
    catastrophic = veto(train_logprobs_BT, rollout_logprobs_BT, selection, settings.veto_threshold)
    keep_BT = selection.usable_BT & ~selection.at_tokens(catastrophic.sequences_S)
    keep_BT &= ~_rejected(rejections, tokens, selection)
    metrics |= weight_report | rejection_metrics(rejections, tokens)
    metrics |= _guard_metrics(selection, keep_BT)
    metrics[PREFIX + "rollout_is_veto_fraction"] = fraction(catastrophic.sequences_S)
    metrics[PREFIX + "rollout_is_catastrophic_token_fraction"] = fraction(
        catastrophic.tokens_BT[selection.active_BT]
    )
    numbers = _numbers(metrics)
    return CorrectionResult(
        weights_BT=weights_BT,
        mask_BT=torch.where(keep_BT, mask_BT, torch.zeros_like(mask_BT)),
        metrics=numbers,
        warnings=health_warnings(numbers),
    )


def _rejected(
    rejections: list[Rejection], tokens: ComparedTokens, selection: TokenSelection
) -> Tensor:
    """True [B, T] at tokens that a rule rejects, alone or with their sequence."""
    rejected_BT = torch.zeros_like(selection.active_BT)
    for rejection in rejections:
        if rejection.by_sequence:
            rejected_S = rejected_BT.new_zeros(selection.num_sequences)
            rejected_S[tokens.sequence_N[rejection.rejected_N]] = True
            rejected_BT |= selection.at_tokens(rejected_S)
        else:
            rejected_BT[selection.compared_BT] |= rejection.rejected_N
    return rejected_BT


def _guard_metrics(selection: TokenSelection, keep_BT: Tensor) -> Metrics:
    incomparable_BT = selection.usable_BT & ~selection.compared_BT
    metrics = {
        "guard/nonfinite_tokens": selection.broken_tokens,
        "guard/nonfinite_rollout_sequences": selection.broken_sequences,
        PREFIX + "incomparable_tokens": incomparable_BT.sum(),
    }
    # Present only where it happened.
    return metrics if bool(keep_BT.any()) else metrics | {"guard/empty_batch": torch.ones(())}


def _empty(mask_BT: Tensor, settings: RolloutCorrectionSettings) -> CorrectionResult:
    """The result for a batch without a token at mask 1."""
    applies = settings.importance_level is not None and settings.traits.applies_weights
    return CorrectionResult(
        weights_BT=torch.zeros_like(mask_BT) if applies else None,
        mask_BT=torch.zeros_like(mask_BT),
        metrics={"guard/empty_batch": 1.0},
        warnings=(),
    )


def _numbers(metrics: Metrics) -> dict[str, float]:
    """All values at once: one synchronisation with the device."""
    device = next(iter(metrics.values())).device
    stacked = torch.stack(
        [value.to(device=device, dtype=torch.float64) for value in metrics.values()]
    )
    return dict(zip(metrics, stacked.tolist(), strict=True))


def _check_shapes(train_logprobs_BT: Tensor, others: dict[str, Tensor | None]) -> None:
    if train_logprobs_BT.dim() != 2:
        raise ValueError(
            f"rollout correction: log-probs must be [B, T], got {tuple(train_logprobs_BT.shape)}"
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != train_logprobs_BT.shape:
            raise ValueError(
                f"rollout correction: {name} has shape {tuple(tensor.shape)}, "
                f"train_logprobs {tuple(train_logprobs_BT.shape)}"
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """`tokens_BT` are catastrophic, `sequences_S` have at least one of them; booleans."""

    tokens_BT: Tensor
    sequences_S: Tensor


def veto(
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    selection: TokenSelection,
    threshold: float | None,
) -> Veto:
    """Tokens at mask 1 whose ratio, not clamped, is below `threshold`, or whose log-ratio is not
    finite; none if `threshold` is None.

    A token that is "not comparable" (rollout log-prob NaN) therefore vetoes its sequence.
    """
    tokens_BT = torch.zeros_like(selection.active_BT)
    if threshold is not None:
        log_ratio_BT = train_logprobs_BT - rollout_logprobs_BT
        fine_BT = torch.isfinite(log_ratio_BT) & (log_ratio_BT >= math.log(threshold))
        tokens_BT = selection.active_BT & ~fine_BT
    sequences_S = tokens_BT.new_zeros(selection.num_sequences)
    sequences_S[selection.sequences_BT[tokens_BT]] = True
    return Veto(tokens_BT=tokens_BT, sequences_S=sequences_S)


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
