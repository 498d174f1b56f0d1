"""Rewards of an agent's steps, compared among steps of the same index.

    A_t = (r_t - mean) / (std + 1e-6)                                             (ALGORITHMS 3.3)

A group consists of the steps with equal index, or those of one prompt's rollouts. r_t is made
elsewhere (`records.training.outcome_rewards`).

Shapes: N steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.rewards.grpo import grpo_advantages

EPSILON = 1e-6


@torch.no_grad()
def stepwise_advantages(
    rewards_N: Tensor,
    step_indices_N: Tensor,
    *,
    prompts_N: Tensor | None = None,
    divide_by_std: bool = True,
    epsilon: float = EPSILON,
) -> Tensor:
    """(r - mean) / (std + epsilon) among steps of equal index (and equal prompt, if given) [N].

    The std is unbiased; without `divide_by_std`, r - mean. A step that is alone in its group gets
    0. Raises ValueError for a reward that is not finite.
    """
    if not bool(torch.isfinite(rewards_N).all()):
        raise ValueError("a step's reward is not finite; leave out steps without reward")
    keys = [step_indices_N] if prompts_N is None else [step_indices_N, prompts_N]
    _, groups_N = torch.unique(torch.stack(keys), dim=1, return_inverse=True)
    rewards_N1 = rewards_N.unsqueeze(-1)
    return grpo_advantages(
        rewards_N1,
        torch.ones_like(rewards_N1),
        groups_N,
        divide_by_std=divide_by_std,
        singleton="zero",
        epsilon=epsilon,
    ).squeeze(-1)
