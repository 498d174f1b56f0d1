"""Which samples learn from a teacher instead of from rewards.

Formulas: ALGORITHMS 7.2. The source names no threshold, so none is a default here.

Shapes: N samples (turns or rollouts).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
