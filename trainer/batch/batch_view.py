"""From ready samples to a view per turn: what teacher and reward say of it, and how old it is.

Pure but for the teacher's forward passes. How the objective uses the view is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from records.lessons.names import LessonKind
from records.types import ReadySample
from trainer.batch.collate import comparable
from trainer.batch.reward_view import eligible_turns, reward_advantages, reward_facts
from trainer.batch.teach import TeachingPlan, teach
from trainer.batch.turn_scores import TurnScores
from trainer.batch.turn_view import Taught, TurnView
from trainer.objectives.options import HindsightOpd, ObjectiveOptions

_HOLDING = (LessonKind.COUNTER, LessonKind.KEEP)


def view_turns(
    samples: Sequence[ReadySample],
    plan: TeachingPlan,
    student: Sequence[TurnScores] | None,
    version_gaps: Sequence[int],
    hold_weight: float,
) -> list[TurnView]:
    """A view of each sample, in order; `version_gaps` are steps between sampling and now,
    `hold_weight` is `trainer.lesson_hold_weight`.
    """
    facts = reward_facts(samples)
    return [
        view_turn(sample, taught, reward, eligible, version_gap, plan.options, hold_weight)
        for sample, taught, reward, eligible, version_gap in zip(
            samples,
            teach(samples, plan, student),
            reward_advantages(facts, plan.options),
            eligible_turns(facts, plan.options),
            version_gaps,
            strict=True,
        )
    ]


def view_turn(
    sample: ReadySample,
    taught: Taught,
    reward_advantage: float,
    eligible: bool,
    version_gap: int,
    options: ObjectiveOptions,
    hold_weight: float = 1.0,
) -> TurnView:
    """The view of one turn, on the device of what the teacher says of it; `hold_weight` counts for
    lessons that hold the policy to the start.
    """
    like = taught.logprobs
    horizon = options.horizon if isinstance(options, HindsightOpd) else None
    reward = torch.full_like(like, reward_advantage)
    if isinstance(options, HindsightOpd) and options.mix == "replace":
        reward = reward * float(not (taught.valid and eligible))
    rollout = torch.full_like(like, float("nan"))
    if comparable(sample):
        rollout = torch.from_numpy(sample.rollout_logprobs).float().to(like.device)
    return TurnView(
        rollout=rollout,
        teacher=like,
        opd_valid=_opd_valid(taught, eligible, horizon),
        reward_advantage=reward,
        after_tool=torch.full_like(like, float(sample.after_tool)),
        version_gap=torch.full_like(like, float(version_gap)),
        support=taught.support,
        choice=taught.choice,
        emphasis=hold_weight if sample.lesson in _HOLDING else 1.0,
    )


def _opd_valid(taught: Taught, eligible: bool, horizon: int | None) -> Tensor:
    """1 at the tokens whose teacher's advantage acts (ALGORITHMS 7.2)."""
    valid = torch.full_like(taught.logprobs, float(taught.valid and eligible))
    if horizon is not None:
        valid[horizon:] = 0.0
    return valid
