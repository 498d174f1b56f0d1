"""What a batch's objective needs to know of every turn before any gradient is taken.

    samples -> [the student before the step] -> [the teacher] -> support, weights, rewards

The passes in brackets are made only where the objective, the correction or several epochs ask for
them. Everything here is detached and per turn; nothing depends on how turns are merged into
sequences or put into micro-batches. Pure except for the teacher's forward passes.

Shapes: R tokens of a turn's response, K tokens per position, C hint candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from records.lessons.names import LessonKind
from records.types import ReadySample
from trainer.batch.collate import comparable
from trainer.batch.prompt_groups import reward_facts
from trainer.batch.reward_view import eligible_turns, reward_advantages
from trainer.batch.teach import Taught, TeachingPlan, TurnSupport, teach
from trainer.batch.turn_scores import TurnScores
from trainer.objectives.hint_choice import HintChoice
from trainer.objectives.option_base import TeacherReach
from trainer.objectives.options import ObjectiveOptions

_HOLDING = (LessonKind.COUNTER, LessonKind.KEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn of the batch, detached: all [R] or [R, K].

    `rollout` is NaN where it cannot be compared. `opd_valid` is 1 where the teacher's advantage
    acts. `reward_advantage` is that of the reward alone, 0 where no reward acts. `emphasis`
    multiplies what the teacher teaches. `sampling` is the policy at the weights that sampled.
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
    sampling: Tensor | None = None

    @property
    def lacks_scores(self) -> bool:
        """Whether a score of the teacher is not finite where its advantage acts."""
        acts = self.opd_valid > 0
        broken = ~torch.isfinite(self.teacher)
        if self.support is not None:
            empty = self.support.valid <= 0
            broken = broken | ~(torch.isfinite(self.support.teacher) | empty).all(dim=-1)
        return bool((acts & broken).any())


def view_turns(
    samples: Sequence[ReadySample],
    plan: TeachingPlan,
    student: Sequence[TurnScores] | None,
    version_gaps: Sequence[int],
    hold_weight: float,
    step: int,
    start_kls: Sequence[float] | None = None,
    sampling: Sequence[Tensor] | None = None,
) -> list[TurnView]:
    """A view of each sample, in order; `version_gaps` are steps between sampling and now,
    `hold_weight` is `trainer.lesson_hold_weight`, `step` counts the steps before this one.
    `start_kls` are the nats of each sample that a reward is charged for, `sampling` the policy at
    the weights that sampled each, if asked for.
    """
    facts = reward_facts(samples, start_kls)
    views = [
        view_turn(sample, taught, reward, eligible, version_gap, plan.options, hold_weight)
        for sample, taught, reward, eligible, version_gap in zip(
            samples,
            teach(samples, plan, student),
            reward_advantages(facts, plan.options, step),
            eligible_turns(facts, plan.options),
            version_gaps,
            strict=True,
        )
    ]
    if sampling is None:
        return views
    return [replace(view, sampling=one) for view, one in zip(views, sampling, strict=True)]


def remember_supports(views: Sequence[TurnView], before: Sequence[TurnScores]) -> list[TurnView]:
    """The views, where they have supports, with the student's scores of these before the first of
    several steps.
    """
    return [
        view
        if view.support is None
        else replace(view, support=replace(view.support, old=scores.support))
        for view, scores in zip(views, before, strict=True)
    ]


def view_turn(
    sample: ReadySample,
    taught: Taught,
    reward_advantage: float,
    eligible: bool,
    version_gap: int,
    options: ObjectiveOptions,
    hold_weight: float,
) -> TurnView:
    """The view of one turn, on the device of its teacher's scores; `hold_weight` applies to lessons
    that hold the policy to the start.
    """
    like = taught.logprobs
    horizon = options.horizon if isinstance(options, TeacherReach) else None
    reward = torch.full_like(like, reward_advantage)
    if isinstance(options, TeacherReach) and options.mix == "replace":
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


def hint_choice_metrics(views: Sequence[TurnView]) -> dict[str, float]:
    """For turns whose tokens chose among hints: tokens shared with the chosen hint's top-k, and the
    chosen hint's index, as means over tokens (ALGORITHMS 3.5); empty without any.
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
