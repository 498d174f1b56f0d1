"""Samples that share a prompt: which they are, statistics of each group, and which samples learn
from a teacher instead of from rewards.

Formulas of the latter: ALGORITHMS 7.2. The source names no threshold, so none is a default here.

Shapes: N samples (turns or rollouts), G groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
