"""Rollout correction of a batch: weights, mask, metrics and warnings in one call.

Facts: ALGORITHMS 4 and 0.1. It needs log-probs of the whole batch only, so it is called once for
all micro-batches: mean and metrics are then those of the global batch. It does not know losses.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.rollout_correction.health import health_warnings
from trainer.objectives.rollout_correction.metrics import (
    PREFIX,
    Metrics,
    fresh_metrics,
    off_policy_metrics,
    tool_metrics,
    weight_metrics,
)
from trainer.objectives.rollout_correction.rejection import (
    Rejection,
    reject,
    rejection_metrics,
    veto,
)
from trainer.objectives.rollout_correction.settings import RolloutCorrectionSettings
from trainer.objectives.rollout_correction.tokens import (
    ComparedTokens,
    TokenSelection,
    compare,
    select_tokens,
)
from trainer.objectives.rollout_correction.weights import (
    applied_weights,
    batch_norm_factor,
    fraction,
    raw_ratios,
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
    selection = select_tokens(train_logprobs_BT, rollout_logprobs_BT, mask_BT, turn_ids_BT)
    if selection.num_sequences == 0:
        return _empty(mask_BT, settings)
    tokens = compare(train_logprobs_BT, rollout_logprobs_BT, selection)
    metrics = off_policy_metrics(tokens)
    is_fresh_BT = selection.compared_BT if fresh_BT is None else fresh_BT > 0
    metrics |= fresh_metrics(tokens, is_fresh_BT[selection.compared_BT])
    after_tool_N = None
    if after_tool_BT is not None:
        after_tool_N = after_tool_BT[selection.compared_BT] > 0
        metrics |= tool_metrics(tokens, after_tool_N)
    weights_BT, weight_report = _weights(tokens, selection, after_tool_N, settings)
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


def _weights(
    tokens: ComparedTokens,
    selection: TokenSelection,
    after_tool_N: Tensor | None,
    settings: RolloutCorrectionSettings,
) -> tuple[Tensor | None, Metrics]:
    """Weights [B, T] if the mode applies them, and their metrics in any case."""
    if settings.importance_level is None:
        return None, {}
    raw = raw_ratios(tokens, settings.importance_level)
    applied = applied_weights(raw, tokens, settings, after_tool_N)
    metrics = weight_metrics(raw, applied, tokens, settings)
    if settings.post_tool_upper is not None and after_tool_N is not None:
        bounded_N = raw.token_N[after_tool_N] > settings.post_tool_upper
        metrics[PREFIX + "post_tool/bounded_fraction"] = fraction(bounded_N)
    weight_N = applied.token_N
    if settings.batch_normalize:
        factor = batch_norm_factor(applied, tokens)
        weight_N = weight_N / factor
        metrics[PREFIX + "rollout_is_batch_norm_factor"] = factor
    if not settings.traits.applies_weights:
        return None, metrics
    weights_BT = selection.usable_BT.to(weight_N.dtype)
    weights_BT[selection.compared_BT] = weight_N
    return weights_BT, metrics


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
