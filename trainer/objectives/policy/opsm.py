"""Off-policy sequence masking: no push away from what the policy has already left.

Formula: ALGORITHMS 6.4. The mask multiplies the loss; denominators stay as they are. With turn ids
a sequence is one turn. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.objectives.batch import selected, sequence_means

OpsmScope = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsmMask:
    """Detached. `keep_BT` is 0.0 at masked tokens and 1.0 elsewhere, also at mask 0 of the input.

    `share_BT` holds, at each token at mask 1, the masked share of its sequence.
    """

    keep_BT: Tensor
    share_BT: Tensor


@torch.no_grad()
def opsm_mask(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    delta: float = 1e-4,
    scope: OpsmScope = "token",
    turn_ids_BT: Tensor | None = None,
) -> OpsmMask:
    """Masks where mean_t(lo - l) of the token's sequence is above `delta`.

    Scope `token` masks only its tokens with A < 0, `sequence` all its tokens whatever their
    advantages. Values at mask 0 are ignored. Raises ValueError for an unknown scope, a negative
    delta, and a token at mask 1 without turn id.
    """
    if scope not in ("token", "sequence") or delta < 0:
        raise ValueError(
            f"opsm: scope is token or sequence and delta not negative, got {scope!r}, {delta}"
        )
    gaps_BT = selected(old_logprobs_BT, mask_BT) - selected(logprobs_BT, mask_BT)
    left_BT = (sequence_means(gaps_BT, mask_BT, turn_ids_BT) > delta) & (mask_BT > 0)
    masked_BT = left_BT & (advantages_BT < 0) if scope == "token" else left_BT
    masked_BT = masked_BT.to(gaps_BT.dtype)
    share_BT = selected(sequence_means(masked_BT, mask_BT, turn_ids_BT), mask_BT)
    return OpsmMask(keep_BT=1.0 - masked_BT, share_BT=share_BT)
