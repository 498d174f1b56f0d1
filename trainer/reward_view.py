"""What rewards say of the turns of a batch: their advantages, and which turns a teacher may act on.

Turns are compared with each other, so this needs the whole batch; it needs no tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import ReadySample
from trainer.objectives.eligibility import eligible_samples, underperforming_share
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids, group_pass_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """A turn as rewards compare it; `prompt_key` is equal for equal prompts."""

    reward: float | None
    step_index: int
    prompt_key: Hashable


def reward_facts(samples: Sequence[ReadySample]) -> list[RewardFacts]:
    """Those of ready samples, in order."""
    return [
        RewardFacts(
            reward=sample.reward,
            step_index=sample.step_index,
            prompt_key=sample.prompt_ids.tobytes(),
        )
        for sample in samples
    ]


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
    threshold = _threshold(options)
    if threshold is None:
        return [True] * len(facts)
    rewards, rates, _ = _pass_rates(facts)
    return eligible_samples(rewards, rates, pass_rate_threshold=threshold).tolist()


def eligibility_metrics(
    facts: Sequence[RewardFacts], options: ObjectiveOptions
) -> dict[str, float]:
    """The share of prompts that rarely pass (ALGORITHMS 7.7); empty without `mix = replace`."""
    threshold = _threshold(options)
    if threshold is None:
        return {}
    _, rates, groups = _pass_rates(facts)
    share = underperforming_share(rates, groups, pass_rate_threshold=threshold)
    return {"opd/frac_underperforming_prompts": share}


def _threshold(options: ObjectiveOptions) -> float | None:
    return options.pass_rate_threshold if isinstance(options, HindsightOpd) else None


def _pass_rates(facts: Sequence[RewardFacts]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, the pass rates of their prompts (NaN without a reward), and the prompts; all [N]."""
    rewards = torch.tensor([float("nan") if one.reward is None else one.reward for one in facts])
    groups = group_ids([one.prompt_key for one in facts])
    known = torch.isfinite(rewards)
    rates = torch.full_like(rewards, float("nan"))
    if bool(known.any()):
        rates[known] = group_pass_rates(rewards[known], groups[known])
    return rewards, rates, groups


def _group(one: RewardFacts, baseline: str) -> Hashable:
    """What a turn is compared with: turns at the same step, or after the same prompt."""
    return one.step_index if baseline == "step" else one.prompt_key
