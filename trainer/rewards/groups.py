"""Samples that are compared with each other: statistics of each group, the advantages of rollouts
relative to the others of their prompt and of steps relative to steps of the same index, and which
samples learn from a teacher instead of from rewards.

    A_t = (r_t - mean) / (std + 1e-6)                                             (ALGORITHMS 3.3)

A group of steps are those with equal index, or those of one prompt's rollouts. Rewards are made
elsewhere (`records.training.outcome_rewards`). Formulas: ALGORITHMS 3.3, 7.2, 8.4 and 8.7. The
source of 7.2 names no threshold, so none is a default here.

Shapes: N samples (turns, rollouts or steps), G groups; B rollouts, T tokens; group numbers are
int64, from 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6
Singleton = Literal["raw", "zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Of each sample's own group, all [N]; `std` (unbiased) is NaN for a group of one."""

    mean: Tensor
    std: Tensor
    count: Tensor


def group_ids(keys: Sequence[Hashable]) -> Tensor:
    """The group of each sample [N], int64, numbered by first appearance of its key."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def members(groups_N: Tensor) -> list[Tensor]:
    """The places of each group's samples [own number], in order, group by group."""
    sizes = groups_N.bincount()
    return list(groups_N.argsort(stable=True).split(sizes[sizes > 0].tolist()))


@torch.no_grad()
def group_statistics(values_N: Tensor, groups_N: Tensor) -> GroupStatistics:
    """Mean, std and size of each sample's group. Raises ValueError for values or groups that do
    not fit: not finite, negative, or of different lengths.
    """
    _check(values_N, groups_N)
    num_groups = int(groups_N.max()) + 1 if len(groups_N) else 0
    counts_G = torch.bincount(groups_N, minlength=num_groups).to(values_N.dtype)
    sums_G = values_N.new_zeros(num_groups).index_add_(0, groups_N, values_N)
    mean_N = (sums_G / counts_G.clamp(min=1))[groups_N]
    squares_N = (values_N - mean_N).square()
    spread_G = values_N.new_zeros(num_groups).index_add_(0, groups_N, squares_N)
    # 0/0 for a group of one: a spread that is not defined is NaN.
    std_G = torch.sqrt(spread_G / (counts_G - 1))
    return GroupStatistics(mean=mean_N, std=std_G[groups_N], count=counts_G[groups_N])


@torch.no_grad()
def group_pass_rates(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """The share of samples with a positive reward (floats) in each sample's group [N]."""
    _check(rewards_N, groups_N)
    return group_statistics((rewards_N > 0).to(rewards_N.dtype), groups_N).mean


def _check(values_N: Tensor, groups_N: Tensor) -> None:
    if values_N.shape != groups_N.shape or values_N.ndim != 1:
        raise ValueError(
            f"values {tuple(values_N.shape)} and groups {tuple(groups_N.shape)} must both be [N]"
        )
    if len(groups_N) and int(groups_N.min()) < 0:
        raise ValueError("a group number is negative; number groups from 0 (group_ids)")
    if not values_N.is_floating_point():
        raise ValueError(f"values of a group must be floats, got {values_N.dtype}")
    if not bool(torch.isfinite(values_N).all()):
        raise ValueError("a value of a group is not finite; leave out samples without reward")


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
    for places in members(groups_B):
        best, second = torch.topk(rewards_B[places], 2).values
        winner = places[torch.argmax(rewards_B[places])]
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


@torch.no_grad()
def best_of_each(rewards_N: Tensor, prompts: Sequence[Tensor], k: int) -> Tensor:
    """Rewards [N], where every k answers to a prompt, in order, share their best one; fewer than k
    answers keep their own. `prompts` are the places of each one's answers (`members`).
    """
    found_N = rewards_N.clone()
    for places in prompts:
        whole = places[: len(places) // k * k]
        if len(whole):
            found_N[whole] = pass_at_k_rewards(rewards_N[whole], k)
    return found_N


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


@torch.no_grad()
def eligible_samples(
    rewards_N: Tensor, pass_rates_N: Tensor, *, pass_rate_threshold: float
) -> Tensor:
    """Bool [N]: the sample failed (reward <= 0) on a prompt that passes at most this often.

    `pass_rates_N` is that of each sample's prompt. A NaN reward or pass rate is not eligible.
    Raises ValueError for a threshold outside [0, 1].
    """
    if not 0.0 <= pass_rate_threshold <= 1.0:
        raise ValueError(
            f"pass_rate_threshold must be within [0, 1], got {pass_rate_threshold}; "
            "it is the highest pass rate of a prompt whose failures learn from the teacher"
        )
    return (rewards_N <= 0) & (pass_rates_N <= pass_rate_threshold)


@torch.no_grad()
def underperforming_share(
    pass_rates_N: Tensor, prompts_N: Tensor, *, pass_rate_threshold: float
) -> float:
    """Share of the prompts that pass at most this often (ALGORITHMS 7.7); NaN without a prompt.

    `prompts_N` numbers the prompts; a prompt with a NaN pass rate is ignored.
    """
    known_N = torch.isfinite(pass_rates_N)
    prompts = torch.unique(prompts_N[known_N])
    seldom = torch.unique(prompts_N[known_N & (pass_rates_N <= pass_rate_threshold)])
    return len(seldom) / len(prompts) if len(prompts) else float("nan")
