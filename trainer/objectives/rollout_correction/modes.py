"""What each mode of rollout correction means for the trainer.

Facts: ALGORITHMS 4.5 and 9 items 11 and 12. It imports no torch, because the configuration checks
names with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["decoupled", "bypass", "pure_is"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTraits:
    """What a mode compares with the rollout engine and what its loss does with the result.

    `train_logprobs` says which log-probs to pass to `correct_rollout`: those of the start of the
    batch (`old`), or the current policy's, recomputed for every update (`current`).
    `clip_anchor` is the denominator of the clipped ratio; None: there is no clipping.
    """

    train_logprobs: Literal["old", "current"]
    clip_anchor: Literal["old", "rollout"] | None
    applies_weights: bool


MODES: Mapping[str, ModeTraits] = {
    "decoupled": ModeTraits(train_logprobs="old", clip_anchor="old", applies_weights=True),
    # The clipped ratio is already current over rollout: weights would apply it twice.
    "bypass": ModeTraits(train_logprobs="current", clip_anchor="rollout", applies_weights=False),
    "pure_is": ModeTraits(train_logprobs="current", clip_anchor=None, applies_weights=True),
}
