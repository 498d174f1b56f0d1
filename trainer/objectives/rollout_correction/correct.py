"""Rollout correction of a batch: weights, mask, metrics and warnings in one call.

Facts: ALGORITHMS 4 and 0.1. It needs log-probs of the whole batch only, so it is called once for
all micro-batches: mean and metrics are then those of the global batch. It does not know losses.
Weights are detached; their metrics are taken after truncation, those before it have the suffix
`_raw`. A veto is one token's against its whole sequence (4.4); rules of rejection are in
rejection.py.

Shapes: B rows, T tokens; N compared tokens; S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.rollout_correction.ratios import (
    PREFIX,
    ComparedTokens,
    Metrics,
    Ratios,
    TokenSelection,
    at_tokens,
    compare,
    comparison_metrics,
    effective_share,
    fraction,
    mean,
    numbers,
    ratio_metrics,
    sequence_ratios,
    spread,
    token_ratios,
)
from trainer.objectives.rollout_correction.rejection import (
    reject,
    rejected_tokens,
    rejection_metrics,
)
from trainer.objectives.rollout_correction.settings import (
    MODES,
    RolloutCorrectionSettings,
    health_warnings,
)

_SMALLEST_MEAN = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionResult:
    """All detached. `weights_BT` is 0 at mask 0 of the input and None where the settings apply no
    weights; `mask_BT` is the input's without what was rejected. `metrics` are plain numbers, NaN
    where there is nothing to measure.
    """

    weights_BT: Tensor | None
    mask_BT: Tensor
    metrics: dict[str, float]

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line per metric that is not healthy."""
        return health_warnings(self.metrics)


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
    the sample's temperature. `MODES` says which ones to pass.

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
    raw = None
    if settings.importance_level is not None:
        by_token = settings.importance_level == "token"
        raw = token_ratios(tokens) if by_token else sequence_ratios(tokens)
    catastrophic = veto(train_logprobs_BT, rollout_logprobs_BT, selection, settings.veto_threshold)
    keep_BT = selection.usable_BT & ~at_tokens(catastrophic.sequences_S, selection.sequences_BT)
    if settings.rejections:
        rejections = [
            reject(tokens, rule, clamp_before_sum=settings.clamp_before_sum)
            for rule in settings.rejections
        ]
        keep_BT &= ~rejected_tokens(rejections, tokens, selection)
        metrics |= rejection_metrics(rejections, tokens)
    metrics |= _guard_metrics(selection, keep_BT)
    weights_BT = None
    if raw is not None:
        weights_BT, weight_metrics = weigh(raw, tokens, selection, after_tool_N, settings)
        metrics |= weight_metrics
    metrics[PREFIX + "rollout_is_veto_fraction"] = fraction(catastrophic.sequences_S)
    metrics[PREFIX + "rollout_is_catastrophic_token_fraction"] = fraction(
        catastrophic.tokens_BT[selection.active_BT]
    )
    return CorrectionResult(
        weights_BT=weights_BT,
        mask_BT=torch.where(keep_BT, mask_BT, torch.zeros_like(mask_BT)),
        metrics=numbers(metrics),
    )


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
    applies = settings.importance_level is not None and MODES[settings.mode].applies_weights
    return CorrectionResult(
        weights_BT=torch.zeros_like(mask_BT) if applies else None,
        mask_BT=torch.zeros_like(mask_BT),
        metrics={"guard/empty_batch": 1.0},
    )


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


def weigh(
    raw: Ratios,
    tokens: ComparedTokens,
    selection: TokenSelection,
    after_tool_N: Tensor | None,
    settings: RolloutCorrectionSettings,
) -> tuple[Tensor | None, Metrics]:
    """Weights [B, T] from `raw` ratios if the mode applies them, and their metrics in any case."""
    applied = _applied_weights(raw, tokens, settings, after_tool_N)
    metrics = _weight_metrics(raw, applied, tokens, settings)
    if settings.post_tool_upper is not None and after_tool_N is not None:
        bounded_N = raw.token_N[after_tool_N] > settings.post_tool_upper
        metrics[PREFIX + "post_tool/bounded_fraction"] = fraction(bounded_N)
    weight_N = applied.token_N
    if settings.batch_normalize:
        factor = _batch_norm_factor(applied, tokens)
        weight_N = weight_N / factor
        metrics[PREFIX + "rollout_is_batch_norm_factor"] = factor
    if not MODES[settings.mode].applies_weights:
        return None, metrics
    weights_BT = selection.usable_BT.to(weight_N.dtype)
    weights_BT[selection.compared_BT] = weight_N
    return weights_BT, metrics


def _applied_weights(
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
    if raw.log_S is not None:
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
    return (upper_S[tokens.sequence_N] if raw.log_S is not None else upper_N), upper_S


def _batch_norm_factor(weights: Ratios, tokens: ComparedTokens) -> Tensor:
    """What to divide weights by: their mean over tokens, or over sequences for weights of those.

    1 where the mean is not above 1e-8, NaN where there are no weights. The batch is the one given
    here, so it has to be the global one.
    """
    is_shared = weights.log_S is not None
    values = tokens.present(weights.sequence_S) if is_shared else weights.token_N
    factor = mean(values)
    return torch.where(factor <= _SMALLEST_MEAN, torch.ones_like(factor), factor)


def _weight_metrics(
    raw: Ratios, applied: Ratios, tokens: ComparedTokens, settings: RolloutCorrectionSettings
) -> Metrics:
    """Of weights before normalisation by the batch: `rollout_is_*` and `rollout_is_*_raw`.

    Deviation and effective sample size clamp to [0, upper], and before truncation to [1/upper,
    upper]; unclamped ones have the suffix `_unclamped`: within the bounds neither can show that
    weights run away. `oob_ratio` is the share of tokens outside both bounds, where there are two.
    """
    high = settings.importance_upper
    floor = 1.0 / high
    # Below this a ratio counts as low.
    low = floor if settings.importance_lower is None else settings.importance_lower
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
