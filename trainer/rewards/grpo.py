"""Advantages of rollouts relative to the other rollouts of their prompt, and of steps relative to
steps of the same index.

    A_t = (r_t - mean) / (std + 1e-6)                                             (ALGORITHMS 3.3)

A group of steps are those with equal index, or those of one prompt's rollouts. Rewards are made
elsewhere (`records.training.outcome_rewards`).

Formulas: ALGORITHMS 3.3, 8.4 and 8.7. Shapes: B rollouts, T tokens; N steps; `groups_B` int64
numbers from 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.rewards.groups import group_statistics

EPSILON = 1e-6
Singleton = Literal["raw", "zero"]


@torch.no_grad()
def rollout_rewards(token_rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sum of a rollout's token rewards at mask 1 [B]."""
    return torch.where(mask_BT > 0, token_rewards_BT, torch.zeros_like(token_rewards_BT)).sum(-1)


@torch.no_grad()
def grpo_advantages(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    *,
    divide_by_std: bool = True,
    singleton: Singleton = "raw",
    epsilon: float = EPSILON,
) -> Tensor:
    """(R - mean) / (std + epsilon) of a rollout's group at each of its tokens [B, T], 0 at mask 0.

    `divide_by_std` False is Dr.GRPO. A rollout alone in its group has mean 0 and std 1, that is its
    raw reward (`singleton` "raw"), or no advantage at all ("zero"). Raises ValueError for rewards
    that are not finite.
    """
    if singleton not in ("raw", "zero"):
        raise ValueError(f"unknown singleton rule {singleton!r}; known: raw, zero")
    rewards_B = rollout_rewards(token_rewards_BT, mask_BT)
    statistics = group_statistics(rewards_B, groups_B)
    alone_B = statistics.count == 1
    mean_B = torch.where(alone_B, torch.zeros_like(rewards_B), statistics.mean)
    advantages_B = rewards_B - mean_B
    if divide_by_std:
        std_B = torch.where(alone_B, torch.ones_like(rewards_B), statistics.std)
        advantages_B = advantages_B / (std_B + epsilon)
    if singleton == "zero":
        advantages_B = torch.where(alone_B, torch.zeros_like(advantages_B), advantages_B)
    return _broadcast(advantages_B, mask_BT)


@torch.no_grad()
def grpo_passk_advantages(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    groups_B: Tensor,
    *,
    divide_by_std: bool = True,
    epsilon: float = EPSILON,
) -> Tensor:
    """The best rollout of a group gets (best - second best) / (std + epsilon), all others 0.

    Of several equally good ones none gets anything. Raises ValueError for a group of one.
    """
    rewards_B = rollout_rewards(token_rewards_BT, mask_BT)
    statistics = group_statistics(rewards_B, groups_B)
    if bool((statistics.count < 2).any()):
        raise ValueError("a group has one rollout; the pass@k advantage needs at least two in each")
    advantages_B = torch.zeros_like(rewards_B)
    for group in torch.unique(groups_B):
        members = torch.nonzero(groups_B == group).squeeze(-1)
        best, second = torch.topk(rewards_B[members], 2).values
        winner = members[torch.argmax(rewards_B[members])]
        advantages_B[winner] = best - second
    if divide_by_std:
        advantages_B = advantages_B / (statistics.std + epsilon)
    return _broadcast(advantages_B, mask_BT)


@torch.no_grad()
def pass_at_k_rewards(rewards_N: Tensor, k: int) -> Tensor:
    """Every k samples in order share the largest reward among them [N] (ALGORITHMS 8.4).

    It saturates as soon as k tries nearly always succeed once. Raises ValueError unless k >= 1
    divides N.
    """
    if k < 1 or len(rewards_N) % k:
        raise ValueError(f"k must be at least 1 and divide {len(rewards_N)} samples, got {k}")
    best = rewards_N.reshape(-1, k).max(dim=-1, keepdim=True).values
    return best.expand(-1, k).reshape(-1)


def _broadcast(advantages_B: Tensor, mask_BT: Tensor) -> Tensor:
    rows_BT = advantages_B.unsqueeze(-1).expand_as(mask_BT)
    return torch.where(mask_BT > 0, rows_BT, torch.zeros_like(rows_BT))


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
