"""What a batch's objective needs to know of every turn before any gradient is taken.

    samples -> [the student before the step] -> [the teacher] -> support, weights, rewards

The passes in brackets are made only where the objective, the correction or several epochs ask for
them. Everything here is detached and per turn; nothing depends on how turns are merged into
sequences or put into micro-batches.

Shapes: R tokens of a turn's response, K tokens per position, C hint candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objectives.hint_choice import HintChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSupport:
    """Tokens at every position of a turn's response, all [R, K]: ids, the student before the step
    (None: it is the student of the step itself), the teacher, and 0.0 in `valid` where a place is
    empty.
    """

    ids: Tensor
    old: Tensor | None
    teacher: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """A teacher's view of one turn: log-probs [R] (NaN without a teacher), the support, which hint
    candidate taught most of it (-1 without a teacher), and what was chosen where several could.
    """

    logprobs: Tensor
    support: TurnSupport | None
    candidate: int
    choice: HintChoice | None = None

    @property
    def valid(self) -> bool:
        """Whether a teacher scored this turn."""
        return self.candidate >= 0


def untaught(length: int, support_size: int, device: torch.device | str) -> Taught:
    """A turn that no teacher scored: NaN log-probs, an empty support."""
    support = None
    if support_size:
        shape = (length, support_size)
        support = TurnSupport(
            ids=torch.zeros(shape, dtype=torch.long, device=device),
            old=torch.zeros(shape, device=device),
            teacher=torch.zeros(shape, device=device),
            valid=torch.zeros(shape, device=device),
        )
    nan = torch.full((length,), float("nan"), device=device)
    return Taught(logprobs=nan, support=support, candidate=-1)


def pad_rows(turns: Sequence[Tensor], fill: float) -> Tensor:
    """[R] or [R, K] of each turn -> [S, Rmax] or [S, Rmax, K], one row a turn."""
    return torch.nn.utils.rnn.pad_sequence(list(turns), batch_first=True, padding_value=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn of the batch, detached: all [R] or [R, K].

    `rollout` is NaN where it cannot be compared. `opd_valid` is 1 where the teacher's advantage
    acts. `reward_advantage` is that of the reward alone, 0 where no reward acts. `emphasis`
    multiplies what the teacher teaches.
    """

    rollout: Tensor
    teacher: Tensor
    opd_valid: Tensor
    reward_advantage: Tensor
    after_tool: Tensor
    version_gap: Tensor
    support: TurnSupport | None
    choice: HintChoice | None = None
    emphasis: float = 1.0

    @property
    def lacks_scores(self) -> bool:
        """Whether a score of the teacher is not finite where its advantage acts."""
        acts = self.opd_valid > 0
        broken = ~torch.isfinite(self.teacher)
        if self.support is not None:
            empty = self.support.valid <= 0
            broken = broken | ~(torch.isfinite(self.support.teacher) | empty).all(dim=-1)
        return bool((acts & broken).any())


def hint_choice_metrics(views: Sequence[TurnView]) -> dict[str, float]:
    """Of turns whose tokens chose among hints: tokens shared with the chosen one's top-k, and the
    number of the chosen one, as means over tokens (ALGORITHMS 3.5); empty without any.
    """
    choices = [view.choice for view in views if view.choice is not None]
    if not choices:
        return {}
    overlap = torch.cat([one.overlap_T for one in choices]).double()
    candidates = torch.cat([one.candidates_T for one in choices]).double()
    return {
        "opd/sel_overlap_at_k_star": overlap.mean().item(),
        "opd/sel_k_star_mean": candidates.mean().item(),
    }
