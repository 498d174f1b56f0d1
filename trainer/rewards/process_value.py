"""What each part of a reasoning adds to the probability of the right answer.

    V_i = mean log-prob of the answer's tokens after the prefix up to episode i and a prompt that
    forces the answer;  U_i = V_i - V_{i-1}, placed at the episode's last token   (ALGORITHMS 8.5)

The log-probs are of the current weights; somebody else computes them. Shapes: E episodes, A answer
tokens, T response tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def answer_values(answer_logprobs_EA: Tensor, answer_mask_EA: Tensor) -> Tensor:
    """V [E]: the mean log-prob of the answer's tokens after each prefix; the first is the empty
    prefix. Raises ValueError for an empty answer or a log-prob that is not finite.
    """
    used_EA = answer_mask_EA > 0
    if not bool(used_EA.any(dim=-1).all()):
        raise ValueError("a prefix has no answer tokens; give the ground truth's tokens")
    if not bool(torch.isfinite(answer_logprobs_EA[used_EA]).all()):
        raise ValueError("an answer's log-prob is not finite; leave the rollout out")
    chosen_EA = torch.where(used_EA, answer_logprobs_EA, torch.zeros_like(answer_logprobs_EA))
    return chosen_EA.sum(dim=-1) / used_EA.sum(dim=-1)


@torch.no_grad()
def marginal_utilities(values_E: Tensor) -> Tensor:
    """U [E - 1]: what each episode adds. Raises ValueError for fewer than two values."""
    if len(values_E) < 2:
        raise ValueError("utilities need the value of the empty prefix and of one episode at least")
    return values_E[1:] - values_E[:-1]


@torch.no_grad()
def place_utilities(utilities_E: Tensor, ends: Sequence[int], num_tokens: int) -> Tensor:
    """Token rewards [T]: each utility at its episode's last token, 0 elsewhere.

    `ends` are exclusive (episodes.py). Raises ValueError where they do not rise within the response
    or are not one per utility.
    """
    bounds = [0, *ends]
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    if len(ends) != len(utilities_E) or not rising or bounds[-1] > num_tokens:
        raise ValueError(
            f"{len(utilities_E)} utilities need as many rising episode ends within {num_tokens} "
            f"tokens, got {list(ends)[:8]}"
        )
    rewards_T = utilities_E.new_zeros(num_tokens)
    rewards_T[torch.tensor(ends, dtype=torch.int64, device=utilities_E.device) - 1] = utilities_E
    return rewards_T
