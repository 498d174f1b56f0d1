"""Which samples and which of their tokens learn from a teacher instead of from rewards.

Formulas: ALGORITHMS 7.2. The source names no threshold, so none is a default here.

Shapes: N samples (turns or rollouts); B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def eligible_samples(
    rewards_N: Tensor, pass_rates_N: Tensor, *, pass_rate_threshold: float
) -> Tensor:
    """Bool [N]: the sample failed (reward <= 0) on a prompt that passes at most so often.

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
def horizon_mask(
    mask_BT: Tensor, horizon: int | None, *, turn_ids_BT: Tensor | None = None
) -> Tensor:
    """`mask_BT` with only the first `horizon` policy tokens of each response left; all for None.

    A response is a row, or a turn where turn ids are given. Only tokens at mask 1 are counted.
    Raises ValueError for a horizon below 1.
    """
    if horizon is None:
        return mask_BT.clone()
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1 token, got {horizon}; use None for all")
    active_BT = mask_BT > 0
    if turn_ids_BT is None:
        early_BT = active_BT.cumsum(dim=-1) <= horizon
    else:
        early_BT = torch.zeros_like(active_BT)
        early_BT[active_BT] = _ranks(turn_ids_BT[active_BT]) < horizon
    return torch.where(early_BT & active_BT, mask_BT, torch.zeros_like(mask_BT))


def _ranks(ids_N: Tensor) -> Tensor:
    """How many earlier entries have the same id [N]."""
    order_N = torch.argsort(ids_N, stable=True)
    _, counts = torch.unique_consecutive(ids_N[order_N], return_counts=True)
    starts_N = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    ranks_N = torch.empty_like(order_N)
    ranks_N[order_N] = torch.arange(len(order_N), device=ids_N.device) - starts_N
    return ranks_N


@torch.no_grad()
def replace_advantages(
    opd_advantages_BT: Tensor,
    reward_advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    eligible_BT: Tensor,
    in_horizon_BT: Tensor,
) -> Tensor:
    """where(eligible, A_opd x horizon, A_rl) at mask 1, else 0; [B, T].

    Beyond the horizon an eligible sample has advantage 0. `eligible_BT` is above 0 at the tokens of
    eligible samples, [B, T] or [B, 1].
    """
    zeros_BT = torch.zeros_like(reward_advantages_BT)
    opd_BT = torch.where((in_horizon_BT > 0) & (mask_BT > 0), opd_advantages_BT, zeros_BT)
    reward_BT = torch.where(mask_BT > 0, reward_advantages_BT, zeros_BT)
    return torch.where(eligible_BT > 0, opd_BT, reward_BT)


@torch.no_grad()
def underperforming_share(
    pass_rates_N: Tensor, prompts_N: Tensor, *, pass_rate_threshold: float
) -> float:
    """Share of the prompts that pass at most so often (ALGORITHMS 7.7); NaN without a prompt.

    `prompts_N` numbers the prompts; a NaN pass rate is of a prompt that says nothing.
    """
    known_N = torch.isfinite(pass_rates_N)
    prompts = torch.unique(prompts_N[known_N])
    seldom = torch.unique(prompts_N[known_N & (pass_rates_N <= pass_rate_threshold)])
    return len(seldom) / len(prompts) if len(prompts) else float("nan")
