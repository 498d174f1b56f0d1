"""How a response's length reduces its reward.

Formulas: ALGORITHMS 8.8, with what each did in the source: uniform collapsed to empty responses,
group-relative was a race to the bottom, the frozen anchor was stable. Lengths are in tokens.
Shapes: N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

UNIFORM_COEF = 1e-4
GROUP_COEF = 0.1
ANCHOR_COEF = 0.01
ANCHOR_PASS_RATE = 0.9
ANCHOR_ANSWERS = 8
"""Answers per pass rate that can set an anchor."""


LengthPenalty: TypeAlias = Literal["uniform", "group", "anchor"]
_COEFS: dict[LengthPenalty, float] = {
    "uniform": UNIFORM_COEF,
    "group": GROUP_COEF,
    "anchor": ANCHOR_COEF,
}


@torch.no_grad()
def penalise_lengths(
    penalty: LengthPenalty,
    rewards_N: Tensor,
    lengths_N: Tensor,
    prompts: Sequence[Tensor],
    anchors_N: Tensor | None,
    *,
    coef: float | None,
    share: float,
) -> Tensor:
    """Rewards after a penalty [N], at `share` of its coefficient `coef` (None: the source's).
    `prompts` are the places of each one's answers, among which the group penalty compares;
    `anchors_N` are for the anchor's.
    """
    coef = share * (_COEFS[penalty] if coef is None else coef)
    if penalty == "uniform":
        return uniform_penalty(rewards_N, lengths_N, coef=coef)
    if penalty == "anchor":
        if anchors_N is None:
            raise ValueError("the anchor penalty needs the anchor of every prompt")
        return anchor_penalty(rewards_N, lengths_N, anchors_N, coef=coef)
    found_N = rewards_N.clone()
    for own in prompts:
        found_N[own] = group_penalty(rewards_N[own], lengths_N[own], rewards_N[own], coef=coef)
    return found_N


@torch.no_grad()
def uniform_penalty(rewards_N: Tensor, lengths_N: Tensor, *, coef: float = UNIFORM_COEF) -> Tensor:
    """R - coef x L [N]. It also pays a wrong answer for being short."""
    _check(rewards_N, lengths_N)
    return rewards_N - coef * lengths_N


@torch.no_grad()
def group_lambda(lengths_N: Tensor) -> Tensor:
    """.5 - (L - min) / (max - min) of one group [N]: .5 for the shortest, -.5 for the longest.

    0 for all if all are equally long.
    """
    if lengths_N.numel() == 0:
        return lengths_N.clone()
    shortest, longest = lengths_N.min(), lengths_N.max()
    if float(longest) == float(shortest):
        return torch.zeros_like(lengths_N)
    return 0.5 - (lengths_N - shortest) / (longest - shortest)


@torch.no_grad()
def group_penalty(
    rewards_N: Tensor, lengths_N: Tensor, correct_N: Tensor, *, coef: float = GROUP_COEF
) -> Tensor:
    """R + coef x lambda of one group's correct samples, R + coef x min(0, lambda) of others [N]."""
    _check(rewards_N, lengths_N)
    lambda_N = group_lambda(lengths_N)
    return rewards_N + coef * torch.where(correct_N > 0, lambda_N, lambda_N.clamp(max=0.0))


@torch.no_grad()
def anchor_penalty(
    rewards_N: Tensor, lengths_N: Tensor, anchors_N: Tensor, *, coef: float = ANCHOR_COEF
) -> Tensor:
    """R - coef x max(0, (L - anchor) / anchor) [N]; NaN anchors (none yet) cost nothing.

    Raises ValueError for an anchor that is not positive.
    """
    _check(rewards_N, lengths_N)
    anchored_N = ~torch.isnan(anchors_N)
    if bool((anchors_N[anchored_N] <= 0).any()):
        raise ValueError("an anchor length must be positive; use NaN for a prompt without one")
    safe_N = torch.where(anchored_N, anchors_N, torch.ones_like(anchors_N))
    excess_N = ((lengths_N - safe_N) / safe_N).clamp(min=0.0)
    return rewards_N - coef * torch.where(anchored_N, excess_N, torch.zeros_like(excess_N))


def next_anchor(
    anchor: float | None,
    *,
    pass_rate: float,
    mean_length: float,
    min_pass_rate: float = ANCHOR_PASS_RATE,
) -> float | None:
    """A prompt's anchor after a step: its mean length when its pass@1 first exceeds
    `min_pass_rate`, and the same ever after; None before.
    """
    if anchor is not None:
        return anchor
    return mean_length if pass_rate > min_pass_rate and mean_length > 0 else None


def prompt_anchor(first: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean length of the answers to a prompt when it first passes often (ALGORITHMS 8.8); None
    before. `first` are the rewards and lengths of the first answers to it, oldest first.
    """
    anchor = None
    for answers in _pooled(first):
        passed = sum(reward is not None and reward > 0 for reward, _ in answers)
        anchor = next_anchor(
            anchor,
            pass_rate=passed / len(answers),
            mean_length=sum(length for _, length in answers) / len(answers),
        )
    return anchor


def _pooled(
    answers: Sequence[tuple[float | None, int]],
) -> Iterator[Sequence[tuple[float | None, int]]]:
    """Groups of ANCHOR_ANSWERS, in order; a smaller rest waits for more answers."""
    for start in range(0, len(answers) - ANCHOR_ANSWERS + 1, ANCHOR_ANSWERS):
        yield answers[start : start + ANCHOR_ANSWERS]


def _check(rewards_N: Tensor, lengths_N: Tensor) -> None:
    if rewards_N.shape != lengths_N.shape:
        raise ValueError(
            f"rewards {tuple(rewards_N.shape)} and lengths {tuple(lengths_N.shape)} must have one "
            "entry per sample each"
        )
    if bool((lengths_N < 0).any()):
        raise ValueError("a length is negative; lengths are numbers of response tokens")
