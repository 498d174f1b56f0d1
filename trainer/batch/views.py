"""What a batch's objective needs to know of every turn before any gradient is taken.

    samples -> [the student before the step] -> [the teacher] -> support, weights, rewards

The passes in brackets are made only where the objective, the correction or several epochs ask for
them. The teacher's view comes from engines' stored scores, or from a model here; a plan of teaching
decides where a support's tokens come from and which hint candidate teaches (ALGORITHMS 3.4, 3.5).
Everything here is detached and per turn; nothing depends on how turns are merged into sequences or
put into micro-batches. Pure except for the teacher's forward passes.

Shapes: R tokens of a turn's response, K tokens per position, C hint candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from records.lessons.names import LessonKind
from records.names import DropReason, SideSource
from records.types import ReadySample
from trainer.batch.collate import TurnScores, comparable, score_responses
from trainer.batch.reward_view import RewardView
from trainer.model.token_states import LogprobModel
from trainer.objectives.distributions.overlap_topk import choose_support
from trainer.objectives.hint_choice import HintChoice, choose_hints, count_overlap, take_chosen
from trainer.objectives.option_base import SupportKind, TeacherReach
from trainer.objectives.options import ObjectiveOptions, OverlapTopk


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
    candidate taught most of it (-1 without a teacher), and the choice where several could teach.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingPlan:
    """How turns are taught: `model` is the teacher inside the trainer, None for engines' scores.
    `side_source` is the source of a support that is stored with its turn.

    What the options say is read once, not for every turn: `support` is whose tokens are used,
    `support_size` how many per position, at most the whole vocabulary; `wants_teacher` and
    `wants_rewards` say what acts, `kd_coef` what the teacher's part is multiplied by.
    """

    options: ObjectiveOptions
    model: LogprobModel | None
    vocab_size: int
    max_tokens: int
    device: torch.device | str
    side_source: SideSource | None = None
    support: SupportKind = field(init=False)
    support_size: int = field(init=False)
    wants_teacher: bool = field(init=False)
    wants_rewards: bool = field(init=False)
    kd_coef: float = field(init=False)

    def __post_init__(self) -> None:
        options, size = self.options, self.options.support_size
        found = {
            "support": options.support,
            # Drawn with replacement, samples may be more than the ids that there are.
            "support_size": size if options.support == "samples" else min(size, self.vocab_size),
            "wants_teacher": "teacher_scalar" in options.needs,
            "wants_rewards": "reward" in options.needs,
            "kd_coef": options.kd_coef,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


def unteachable(sample: ReadySample, plan: TeachingPlan) -> DropReason | None:
    """What this plan needs and a sample lacks, as a drop reason; None if it can train."""
    if not plan.wants_teacher or not has_teacher(sample, plan):
        if not plan.wants_rewards or sample.reward is None:
            lost = DropReason.TEACHER_LOGPROBS_INVALID
            return lost if plan.wants_teacher else DropReason.NO_HINT
        # ALGORITHMS 3.1, 3.2: without hint and without verdict there is nothing to train.
        is_neutral = sample.reward == 0 and not plan.options.compares_rewards
        return DropReason.NEUTRAL_REWARD if is_neutral else None
    if plan.model is None and plan.support == "teacher":
        ids = sample.teachings[0].topk_ids if sample.teachings else None
        if ids is None or ids.shape[-1] < plan.support_size:
            return DropReason.TEACHER_LOGPROBS_INVALID
    return None


def has_teacher(sample: ReadySample, plan: TeachingPlan) -> bool:
    """Whether a teacher can look at this turn: a hinted prompt, or finite scores of an engine."""
    if plan.model is not None:
        return bool(sample.teachings)
    return bool(torch.isfinite(torch.from_numpy(sample.teacher_logprobs)).all())


def teach(
    samples: Sequence[ReadySample], plan: TeachingPlan, student: Sequence[TurnScores] | None
) -> list[Taught]:
    """The teacher's view of each sample; `student` are the scores before the step, with top-k
    tokens where the objective's support is made of them.
    """
    size = plan.support_size
    result = [untaught(len(one.response_ids), size, plan.device) for one in samples]
    if not plan.wants_teacher:
        return result
    indices = [index for index, one in enumerate(samples) if has_teacher(one, plan)]
    if plan.model is None:
        for index in indices:
            result[index] = _from_engine(samples[index], plan)
        return result
    return _from_model(samples, indices, plan, student, result)


def _from_engine(sample: ReadySample, plan: TeachingPlan) -> Taught:
    logprobs = torch.from_numpy(sample.teacher_logprobs).to(plan.device)
    if plan.support == "none":
        return Taught(logprobs=logprobs, support=None, candidate=0)
    if plan.side_source is not None:
        return Taught(logprobs=logprobs, support=_side_support(sample, plan), candidate=0)
    first = sample.teachings[0]
    if first.topk_ids is None or first.topk_logprobs is None:
        raise ValueError(f"turn {sample.turn_id} has no top-k scores of its teacher")
    size = plan.support_size
    ids = torch.from_numpy(first.topk_ids[:, :size]).long().to(plan.device)
    values = torch.from_numpy(first.topk_logprobs[:, :size]).to(plan.device)
    support = TurnSupport(ids=ids, old=None, teacher=values, valid=torch.ones_like(values))
    return Taught(logprobs=logprobs, support=support, candidate=0)


def _from_model(
    samples: Sequence[ReadySample],
    indices: Sequence[int],
    plan: TeachingPlan,
    student: Sequence[TurnScores] | None,
    result: list[Taught],
) -> list[Taught]:
    """All candidates of all turns are scored in one sweep."""
    chooses = isinstance(plan.options, OverlapTopk)
    rows = [
        (index, candidate)
        for index in indices
        for candidate in range(len(samples[index].teachings) if chooses else 1)
    ]
    if not rows or plan.model is None:
        return result
    asked = None
    if plan.support in ("student", "overlap"):
        asked = [_student_tokens(student, index, plan)[0] for index, _ in rows]
    scores = score_responses(
        plan.model,
        [samples[index].teachings[candidate].hinted_prompt_ids for index, candidate in rows],
        [samples[index].response_ids for index, _ in rows],
        max_tokens=plan.max_tokens,
        device=plan.device,
        support_ids=asked,
        top_k=plan.support_size if chooses or plan.support == "teacher" else 0,
    )
    by_turn: dict[int, list[TurnScores]] = {}
    for (index, _), score in zip(rows, scores, strict=True):
        by_turn.setdefault(index, []).append(score)
    for index, candidates in by_turn.items():
        result[index] = _taught(samples[index], index, candidates, plan, student)
    return result


def _taught(
    sample: ReadySample,
    index: int,
    candidates: Sequence[TurnScores],
    plan: TeachingPlan,
    student: Sequence[TurnScores] | None,
) -> Taught:
    options = plan.options
    if not isinstance(options, OverlapTopk):
        score = candidates[0]
        support = None
        if plan.support == "samples":
            support = _side_support(sample, plan)
        elif plan.support != "none":
            support = _support(score, index, plan, student)
        return Taught(logprobs=score.logprobs, support=support, candidate=0)
    own = None if student is None else student[index].topk_ids
    if own is None:
        raise ValueError("choosing hints by overlap needs the student's top-k")
    overlap_CT = count_overlap(own, torch.stack([_known(one.topk_ids) for one in candidates]))
    choice = choose_hints(overlap_CT, options.hint_choice)

    def pick(values: Sequence[Tensor | None]) -> Tensor:
        return take_chosen(torch.stack([_known(value) for value in values]), choice.candidates_T)

    chosen = TurnScores(
        logprobs=pick([one.logprobs for one in candidates]),
        logprobs_sampled=candidates[0].logprobs_sampled,
        support=None if options.subset == "teacher" else pick([one.support for one in candidates]),
        topk_ids=pick([one.topk_ids for one in candidates]),
        topk=pick([one.topk for one in candidates]),
    )
    most = int(torch.mode(choice.candidates_T).values)
    return Taught(
        logprobs=chosen.logprobs,
        support=_support(chosen, index, plan, student),
        candidate=most,
        choice=choice,
    )


def _support(
    score: TurnScores, index: int, plan: TeachingPlan, student: Sequence[TurnScores] | None
) -> TurnSupport:
    subset = plan.support
    assert subset != "none"
    assert subset != "samples"
    if subset == "teacher":
        ids, old, teacher = _known(score.topk_ids), None, _known(score.topk)
    else:
        ids, old = _student_tokens(student, index, plan)
        teacher = _known(score.support)
    theirs = ids if subset == "student" else _known(score.topk_ids)
    chosen = choose_support(ids, theirs, subset)
    valid = chosen.valid.to(teacher.dtype)
    return TurnSupport(ids=chosen.ids, old=old, teacher=teacher, valid=valid)


def _side_support(sample: ReadySample, plan: TeachingPlan) -> TurnSupport:
    """The stored side samples: a finite cache."""
    side = sample.side_samples
    if side is None:
        raise ValueError(f"turn {sample.turn_id} has no side samples; draw them before the step")
    teacher = torch.from_numpy(side.teacher_logprobs).to(plan.device)
    return TurnSupport(
        ids=torch.from_numpy(side.ids).long().to(plan.device),
        old=torch.from_numpy(side.rollout_logprobs).to(plan.device),
        teacher=teacher,
        valid=torch.ones_like(teacher),
    )


def _student_tokens(
    student: Sequence[TurnScores] | None, index: int, plan: TeachingPlan
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs) of the support that the student's own pass found."""
    if student is None:
        raise ValueError(f"support {plan.support!r} needs a pass of the student before")
    return _known(student[index].topk_ids), _known(student[index].topk)


def _known(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


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
    rewards: RewardView,
    version_gaps: Sequence[int],
    hold_weight: float,
    sampling: Sequence[Tensor] | None = None,
) -> list[TurnView]:
    """A view of each sample, in order; `rewards` is what those say of each, `version_gaps` are
    steps between sampling and now, `hold_weight` is `trainer.lesson_hold_weight`, `sampling` the
    policy at the weights that sampled each, if asked for.
    """
    views = [
        view_turn(sample, taught, advantage, eligible, version_gap, plan.options, hold_weight)
        for sample, taught, advantage, eligible, version_gap in zip(
            samples,
            teach(samples, plan, student),
            rewards.advantages,
            rewards.eligible,
            version_gaps,
            strict=True,
        )
    ]
    if sampling is None:
        return views
    return [replace(view, sampling=one) for view, one in zip(views, sampling, strict=True)]


def support_ids(views: Sequence[TurnView]) -> list[Tensor]:
    """The tokens [R, K] of each view's support; the objective has one."""
    return [view.support.ids for view in views if view.support is not None]


def remember_supports(views: Sequence[TurnView], before: Sequence[TurnScores]) -> list[TurnView]:
    """The views, where they have supports, with the student's scores of these before the first of
    several steps. A support that is stored with its turn has those of the weights it comes from.
    """
    return [
        view
        if view.support is None or view.support.old is not None
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
