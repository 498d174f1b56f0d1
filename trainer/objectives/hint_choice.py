"""Which of a turn's hint candidates teaches a token: the one whose teacher overlaps the student.

Formula: ALGORITHMS 3.5. Candidates are sorted shortest first, so the lowest index is the shortest
hint, and it wins every tie. It looks at one turn at a time, because turns differ in how many
candidates they have; it knows nothing of losses.

Shapes: C hint candidates, T tokens, K support entries per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.objectives.distributions.gather import overlap_counts

HintChoiceMode = Literal["shortest", "token_optimal", "sequence_optimal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintChoice:
    """Candidate index per token [T] (int64), and how many top-k tokens it shares there [T]."""

    candidates_T: Tensor
    overlap_T: Tensor


@torch.no_grad()
def count_overlap(student_ids_TK: Tensor, teacher_ids_CTK: Tensor) -> Tensor:
    """How many of the student's top-k tokens are in each candidate's top-k [C, T], int64.

    Negative ids are empty places and match nothing; the two sides may have different K. Raises
    ValueError if the tokens differ in number.
    """
    num_candidates, num_tokens, _ = teacher_ids_CTK.shape
    if student_ids_TK.shape[0] != num_tokens:
        raise ValueError(
            f"count_overlap: {student_ids_TK.shape[0]} tokens of the student, {num_tokens} of "
            "the teacher; score the same response with both"
        )
    return overlap_counts(student_ids_TK.expand(num_candidates, -1, -1), teacher_ids_CTK)


@torch.no_grad()
def choose_hints(
    overlap_CT: Tensor,
    mode: HintChoiceMode,
    *,
    step_spans: Sequence[Sequence[int]] | None = None,
) -> HintChoice:
    """One candidate per token: the first, the best at that token, or the best over the turn.

    `step_spans` are half-open [start, end) ranges of tokens; `sequence_optimal` then chooses within
    each, and tokens outside take candidate 0; without spans the whole response is one. Raises
    ValueError for an unknown mode, no candidates, or a span outside the response.
    """
    num_candidates, num_tokens = overlap_CT.shape
    if num_candidates == 0:
        raise ValueError("choose_hints: no hint candidates; drop the turn instead")
    if mode not in get_args(HintChoiceMode):
        raise ValueError(f"unknown hint choice {mode!r}; use {', '.join(get_args(HintChoiceMode))}")
    candidates_T = torch.zeros(num_tokens, dtype=torch.int64, device=overlap_CT.device)
    if mode == "token_optimal":
        candidates_T = _first_best(overlap_CT)
    if mode == "sequence_optimal":
        for start, end in step_spans or [(0, num_tokens)]:
            if not 0 <= start <= end <= num_tokens:
                raise ValueError(
                    f"choose_hints: step span [{start}, {end}) is outside {num_tokens} tokens"
                )
            candidates_T[start:end] = _first_best(overlap_CT[:, start:end].sum(dim=-1))
    return HintChoice(candidates_T=candidates_T, overlap_T=take_chosen(overlap_CT, candidates_T))


def take_chosen(values: Tensor, candidates_T: Tensor) -> Tensor:
    """Each token's values under its own candidate: [C, T, ...] and [T] to [T, ...]."""
    return values[candidates_T, torch.arange(candidates_T.shape[0], device=values.device)]


def _first_best(votes: Tensor) -> Tensor:
    # argmax guarantees nothing about ties; a lower index adds less than one vote and breaks them.
    num_candidates = votes.shape[0]
    ranks = torch.arange(num_candidates - 1, -1, -1, device=votes.device)
    return (votes * num_candidates + ranks.reshape(-1, *([1] * (votes.dim() - 1)))).argmax(dim=0)
