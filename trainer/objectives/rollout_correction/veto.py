"""The veto: one catastrophic token rejects its whole sequence.

Formula: ALGORITHMS 4.4. It is independent of weights and rejection rules and overrides them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.rollout_correction.tokens import TokenSelection


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
