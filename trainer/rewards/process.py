"""Process rewards: how much the worth of a state rises from one to the next, and advantages that
keep such a reward at its token instead of summing it away.

Outcome and process rewards are normalised separately, then every token gets the sum of those at and
after it (ALGORITHMS 8.5, 8.6). Standard GRPO sums a rollout's rewards first, which leaves one
number per rollout. Shapes: E states, in the order of a session; B rollouts, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.normalise import Normalised, normalise

EPSILON = 1e-6


@torch.no_grad()
def marginal_utilities(values_E: Tensor) -> Tensor:
    """U_i = V_(i+1) - V_i [E - 1]. Raises ValueError for fewer than two values."""
    if len(values_E) < 2:
        raise ValueError("utilities need at least two values")
    return values_E[1:] - values_E[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPreserving:
    """`rewards` after normalisation and `advantages`, their reverse cumulative sum; both [B, T].

    `outcome` and `process` hold each kind's statistics.
    """

    rewards: Tensor
    advantages: Tensor
    outcome: Normalised
    process: Normalised


def outcome_mask(mask_BT: Tensor) -> Tensor:
    """Bool [B, T]: the last token at mask 1 of each row, whatever its reward."""
    active_BT = mask_BT > 0
    left_BT = active_BT.flip(-1).cumsum(-1).flip(-1)
    return active_BT & (left_BT == 1)


def process_mask(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Bool [B, T]: tokens at mask 1 before the last with a reward other than 0."""
    return (mask_BT > 0) & ~outcome_mask(mask_BT) & (rewards_BT != 0)


@torch.no_grad()
def returns(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sum of the rewards at and after each token [B, T], 0 at mask 0."""
    active_BT = mask_BT > 0
    zeros_BT = torch.zeros_like(rewards_BT)
    selected_BT = torch.where(active_BT, rewards_BT, zeros_BT)
    return torch.where(active_BT, selected_BT.flip(-1).cumsum(-1).flip(-1), zeros_BT)


@torch.no_grad()
def token_preserving_advantages(
    rewards_BT: Tensor, mask_BT: Tensor, *, epsilon: float = EPSILON
) -> TokenPreserving:
    """(r - mean) / (std + epsilon) of outcomes and of process rewards separately, then the returns.

    A kind with fewer than two rewards stays as it is; equal rewards of a kind become 0. Raises
    ValueError for a reward at mask 1 that is not finite.
    """
    outcomes_BT = outcome_mask(mask_BT)
    outcome = normalise(rewards_BT, outcomes_BT, epsilon=epsilon, min_std=0.0)
    process = normalise(rewards_BT, process_mask(rewards_BT, mask_BT), epsilon=epsilon, min_std=0.0)
    normalised_BT = outcome.values + process.values
    return TokenPreserving(
        rewards=normalised_BT,
        advantages=returns(normalised_BT, mask_BT),
        outcome=outcome,
        process=process,
    )
