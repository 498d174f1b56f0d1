"""From ready samples to a view per turn: what teacher and reward say of it, and how old it is.

Pure but for the teacher's forward passes. How the objective uses the view is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from records.types import ReadySample
from trainer.collate import comparable
from trainer.objectives.eligibility import eligible_samples
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids, group_pass_rates
from trainer.teach import TeachingPlan, teach
from trainer.turn_scores import TurnScores
from trainer.turn_view import Taught, TurnView


def view_turns(
    samples: Sequence[ReadySample],
    plan: TeachingPlan,
    student: Sequence[TurnScores] | None,
    version_gaps: Sequence[int],
) -> list[TurnView]:
    """A view of each sample, in order; `version_gaps` are steps between sampling and now."""
    taught = teach(samples, plan, student)
    rewards = _reward_advantages(samples, plan.options)
    eligible = _eligible(samples, plan.options)
    horizon = plan.options.horizon if isinstance(plan.options, HindsightOpd) else None
    views = []
    for index, sample in enumerate(samples):
        length = len(sample.response_ids)
        valid = _opd_valid(taught[index], eligible[index], horizon)
        reward = torch.full((length,), rewards[index], device=plan.device)
        if isinstance(plan.options, HindsightOpd) and plan.options.mix == "replace":
            reward = reward * float(not (taught[index].valid and eligible[index]))
        rollout = torch.full((length,), float("nan"))
        if comparable(sample):
            rollout = torch.from_numpy(sample.rollout_logprobs).float()
        views.append(
            TurnView(
                rollout=rollout.to(plan.device),
                teacher=taught[index].logprobs,
                opd_valid=valid,
                reward_advantage=reward,
                after_tool=torch.full((length,), float(sample.after_tool), device=plan.device),
                version_gap=torch.full((length,), float(version_gaps[index]), device=plan.device),
                support=taught[index].support,
            )
        )
    return views


def _opd_valid(taught: Taught, eligible: bool, horizon: int | None) -> Tensor:
    """1 at the tokens whose teacher's advantage acts (ALGORITHMS 7.2)."""
    valid = torch.full_like(taught.logprobs, float(taught.valid and eligible))
    if horizon is not None:
        valid[horizon:] = 0.0
    return valid


def _reward_advantages(samples: Sequence[ReadySample], options: ObjectiveOptions) -> list[float]:
    """The reward's advantage of each turn; a turn without a reward has none, which adds 0."""
    if "reward" not in options.needs:
        return [0.0] * len(samples)
    baseline = options.reward_baseline if isinstance(options, HindsightOpd) else "none"
    rewards = [0.0 if sample.reward is None else sample.reward for sample in samples]
    if baseline == "none":
        return rewards
    known = [index for index, sample in enumerate(samples) if sample.reward is not None]
    groups = group_ids([_group(samples[index], baseline) for index in known])
    advantages = stepwise_advantages(torch.tensor([rewards[index] for index in known]), groups)
    for index, advantage in zip(known, advantages.tolist(), strict=True):
        rewards[index] = advantage
    return rewards


def _group(sample: ReadySample, baseline: str) -> bytes | int:
    """What a turn is compared with: turns at the same step, or after the same prompt."""
    return sample.step_index if baseline == "step" else sample.prompt_ids.tobytes()


def _eligible(samples: Sequence[ReadySample], options: ObjectiveOptions) -> list[bool]:
    """Failed turns of prompts that rarely pass (ALGORITHMS 7.2); all without `mix = replace`."""
    if not isinstance(options, HindsightOpd) or options.mix != "replace":
        return [True] * len(samples)
    assert options.pass_rate_threshold is not None
    rewards = torch.tensor(
        [float("nan") if sample.reward is None else sample.reward for sample in samples]
    )
    known = torch.isfinite(rewards)
    rates = torch.full_like(rewards, float("nan"))
    if bool(known.any()):
        groups = group_ids([sample.prompt_ids.tobytes() for sample in samples])
        rates[known] = group_pass_rates(rewards[known], groups[known])
    return eligible_samples(
        rewards, rates, pass_rate_threshold=options.pass_rate_threshold
    ).tolist()
