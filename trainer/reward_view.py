"""What rewards say of the turns of a batch: their advantages, and which turns a teacher may act on.

Turns are compared with each other, so this needs the whole batch; it needs no tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from trainer.objectives.eligibility import eligible_samples
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids, group_pass_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """A turn as rewards compare it; `prompt_key` is equal for equal prompts."""

    reward: float | None
    step_index: int
    prompt_key: Hashable


def reward_advantages(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> list[float]:
    """The reward's advantage of each turn; a turn without a reward has none, which adds 0."""
    if "reward" not in options.needs:
        return [0.0] * len(facts)
    baseline = options.reward_baseline if isinstance(options, HindsightOpd) else "none"
    rewards = [0.0 if one.reward is None else one.reward for one in facts]
    if baseline == "none":
        return rewards
    known = [index for index, one in enumerate(facts) if one.reward is not None]
    groups = group_ids([_group(facts[index], baseline) for index in known])
    advantages = stepwise_advantages(torch.tensor([rewards[index] for index in known]), groups)
    for index, advantage in zip(known, advantages.tolist(), strict=True):
        rewards[index] = advantage
    return rewards


def eligible_turns(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> list[bool]:
    """Failed turns of prompts that rarely pass (ALGORITHMS 7.2); all without `mix = replace`."""
    if not isinstance(options, HindsightOpd) or options.mix != "replace":
        return [True] * len(facts)
    assert options.pass_rate_threshold is not None
    rewards = torch.tensor([float("nan") if one.reward is None else one.reward for one in facts])
    known = torch.isfinite(rewards)
    rates = torch.full_like(rewards, float("nan"))
    if bool(known.any()):
        groups = group_ids([one.prompt_key for one in facts])
        rates[known] = group_pass_rates(rewards[known], groups[known])
    return eligible_samples(
        rewards, rates, pass_rate_threshold=options.pass_rate_threshold
    ).tolist()


def _group(one: RewardFacts, baseline: str) -> Hashable:
    """What a turn is compared with: turns at the same step, or after the same prompt."""
    return one.step_index if baseline == "step" else one.prompt_key
