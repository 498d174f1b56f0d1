"""From per-token values to one number: every reduction is a weight per token.

Formulas: ALGORITHMS 2.8. `token_weights` gives the weight of each token, `weighted_sum` selects and
then sums, so that nothing at mask 0 (NaN included) can reach a result. A reduction over several
micro-batches is the sum of their weighted sums, given the counts of the GLOBAL batch.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.names import AggregationMode

_EPSILON = 1e-8


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """The values at mask 1, zeros elsewhere: no garbage there reaches the arithmetic after it.

    Apply it to inputs, because a NaN that is selected away later still has a NaN gradient.
    """
    return torch.where(mask > 0, values, torch.zeros_like(values))


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of value x weight over tokens with a weight; a differentiable zero if there are none."""
    return (selected(values_BT, weights_BT) * weights_BT).sum()


@torch.no_grad()
def token_weights(
    mask_BT: Tensor,
    mode: AggregationMode,
    *,
    turn_ids_BT: Tensor | None = None,
    num_turns: int | None = None,
    num_tokens: float | None = None,
    num_sequences: int | None = None,
    horizon: float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Weight [B, T] of each token, 0 at mask 0.

    Global counts (`num_turns`, `num_tokens`, `num_sequences`) default to those of this batch. Empty
    rows and empty turns are not counted. A turn never spans two rows. `turn_ids_BT` is -1 where
    there is no policy token. Raises ValueError for an unknown mode, missing turn ids, and several
    ranks (`dp_size`) without the global count that the mode divides by.
    """
    if dp_size > 1:
        _require_global_count(mode, num_turns, num_tokens, num_sequences)
    if mode == "token-sum":
        return mask_BT * dp_size
    if mode == "token-mean":
        total = num_tokens if num_tokens is not None else float(mask_BT.sum())
        return mask_BT * (dp_size / max(total, 1.0))
    counts_B1 = mask_BT.sum(dim=-1, keepdim=True)
    rows = num_sequences if num_sequences is not None else int((counts_B1 > 0).sum())
    per_row = dp_size / max(rows, 1)
    if mode == "seq-mean-token-sum":
        return mask_BT * per_row
    if mode == "seq-mean-token-sum-norm":
        return mask_BT * (per_row / (horizon if horizon is not None else mask_BT.shape[-1]))
    if mode == "seq-mean-token-mean":
        return mask_BT * per_row / (counts_B1 + _EPSILON)
    if turn_ids_BT is None:
        raise ValueError(f"aggregation mode {mode!r} needs turn ids")
    counts_BT, turns_B1 = _turn_counts(mask_BT, turn_ids_BT)
    if mode == "turn-mean-token-mean":
        turns = num_turns if num_turns is not None else int(turns_B1.sum())
        return mask_BT * (dp_size / max(turns, 1)) / counts_BT
    if mode == "seq-mean-turn-mean":
        return mask_BT * per_row / (counts_BT * turns_B1.clamp(min=1))
    raise ValueError(f"unknown aggregation mode {mode!r}")


def count_turns(mask_BT: Tensor, turn_ids_BT: Tensor) -> int:
    """How many turns have at least one token at mask 1."""
    return int(torch.unique(turn_ids_BT[mask_BT > 0]).numel())


def sequence_means(values_BT: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor | None = None) -> Tensor:
    """The mean over tokens at mask 1 of each token's own sequence [B, T], with gradient.

    With turn ids a sequence is one turn, else a row, and every token of it gets its mean, also at
    mask 0; 0 where there is no turn id or nothing at mask 1. Raises ValueError for a token at mask
    1 without turn id.
    """
    values_BT = selected(values_BT, mask_BT)
    if turn_ids_BT is None:
        counts_B1 = mask_BT.sum(dim=-1, keepdim=True).clamp(min=1.0)
        return ((values_BT * mask_BT).sum(dim=-1, keepdim=True) / counts_B1).expand_as(values_BT)
    if bool((turn_ids_BT[mask_BT > 0] < 0).any()):
        raise ValueError("a token at mask 1 has no turn id")
    # A turn never spans two rows, whether its ids count per row or per batch.
    rows_B1 = torch.arange(values_BT.shape[0], device=values_BT.device).unsqueeze(-1)
    stride = int(turn_ids_BT.max()) + 1 if turn_ids_BT.numel() else 1
    keys_BT = rows_B1 * max(stride, 1) + turn_ids_BT.long().clamp(min=0)
    turns, turns_BT = torch.unique(keys_BT, return_inverse=True)
    # In float64, so that the order of accumulation does not matter.
    zeros = torch.zeros(turns.numel(), dtype=torch.float64, device=values_BT.device)
    counts = zeros.index_add(0, turns_BT.flatten(), mask_BT.flatten().double())
    sums = zeros.index_add(0, turns_BT.flatten(), (values_BT * mask_BT).flatten().double())
    means_BT = (sums / counts.clamp(min=1.0))[turns_BT].to(values_BT.dtype)
    return selected(means_BT, turn_ids_BT >= 0)


def _require_global_count(
    mode: AggregationMode,
    num_turns: int | None,
    num_tokens: float | None,
    num_sequences: int | None,
) -> None:
    """A rank that divides by its own count would weigh its tokens by how few it has."""
    needed = {"token-mean": ("num_tokens", num_tokens), "token-sum": ("", 0)}
    needed["turn-mean-token-mean"] = ("num_turns", num_turns)
    name, value = needed.get(mode, ("num_sequences", num_sequences))
    if value is None:
        raise ValueError(f"aggregation mode {mode!r} over several ranks needs {name} of them all")


def _turn_counts(mask_BT: Tensor, turn_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens at mask 1 of each token's own turn [B, T], at least 1; non-empty turns per row [B, 1].

    Integer counts, so that the result does not depend on the order of accumulation.
    """
    active_BT = mask_BT > 0
    if bool((turn_ids_BT[active_BT] < 0).any()):
        raise ValueError("a token at mask 1 has no turn id")
    flat = turn_ids_BT[active_BT]
    counts = torch.bincount(flat, minlength=1)
    counts_BT = torch.ones_like(mask_BT)
    counts_BT[active_BT] = counts[flat].to(mask_BT.dtype)
    # Each turn contributes its tokens' 1/count, which sum to one per turn.
    shares_BT = torch.where(active_BT, 1.0 / counts_BT, torch.zeros_like(counts_BT))
    return counts_BT, shares_BT.sum(dim=-1, keepdim=True).round()
