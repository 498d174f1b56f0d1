"""From per-token values to one number: every reduction is a weight per token.

Formulas: ALGORITHMS 2.8. `token_weights` gives the weight of each token, `weighted_sum` selects and
then sums, so that nothing at mask 0 (NaN included) can reach a result. A reduction over several
micro-batches is the sum of their weighted sums, given the counts of the GLOBAL batch.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "turn-mean-token-mean",
    "seq-mean-turn-mean",
]
_EPSILON = 1e-8


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of value x weight over tokens with a weight; a differentiable zero if there are none."""
    selected_BT = torch.where(weights_BT > 0, values_BT, torch.zeros_like(values_BT))
    return (selected_BT * weights_BT).sum()


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
    rows and empty turns count nowhere. A turn never spans two rows. `turn_ids_BT` holds -1 where no
    policy token is. Raises ValueError for an unknown mode or missing turn ids.
    """
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
