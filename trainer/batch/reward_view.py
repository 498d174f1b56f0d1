"""What rewards say of the turns of a batch: their advantages, and which turns a teacher may act on.

Turns are compared with each other, so this needs the whole batch; it needs no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import ReadySample
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.eligibility import eligible_samples, underperforming_share
from trainer.objectives.policy.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids, group_pass_rates
from trainer.rewards.grpo import grpo_passk_advantages
from trainer.rewards.length import (
    ANCHOR_COEF,
    GROUP_COEF,
    UNIFORM_COEF,
    anchor_penalty,
    group_penalty,
    length_metrics,
    uniform_penalty,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """A turn as rewards compare it; `prompt_key` is equal for equal prompts, `length` counts the
    tokens of the response.
    """

    reward: float | None
    step_index: int
    prompt_key: Hashable
    length: int


def reward_facts(samples: Sequence[ReadySample]) -> list[RewardFacts]:
    """Those of ready samples, in order."""
    return [
        RewardFacts(
            reward=sample.reward,
            step_index=sample.step_index,
            prompt_key=sample.prompt_ids.tobytes(),
            length=len(sample.response_ids),
        )
        for sample in samples
    ]


def reward_advantages(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> list[float]:
    """The reward's advantage of each turn; a turn without a reward has none, which adds 0."""
    if "reward" not in options.needs:
        return [0.0] * len(facts)
    known = [one for one in facts if one.reward is not None]
    found = iter(_of_known(known, options))
    return [0.0 if one.reward is None else next(found) for one in facts]


def _of_known(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> list[float]:
    """Advantages of turns that have a reward."""
    rewards = torch.tensor([one.reward for one in facts], dtype=torch.float64)
    if not isinstance(options, HindsightOpd) or not facts:
        return rewards.tolist()
    rewards = _less_length(rewards, facts, options)
    if options.reward_baseline == "none":
        return rewards.tolist()
    groups = group_ids([_group(one, options.reward_baseline) for one in facts])
    compare = _ahead if options.reward_baseline == "passk" else stepwise_advantages
    return compare(rewards, groups, divide_by_std=options.divide_by_std).tolist()


def _ahead(rewards: Tensor, groups: Tensor, *, divide_by_std: bool) -> Tensor:
    """What pass@k rewards: the lead of each group's best; a turn alone has nobody to lead [N]."""
    several = groups.bincount()[groups] > 1
    advantages = torch.zeros_like(rewards)
    if bool(several.any()):
        own = rewards[several].unsqueeze(-1)
        numbers = groups[several].unique(return_inverse=True)[1]
        found = grpo_passk_advantages(
            own, torch.ones_like(own), numbers, divide_by_std=divide_by_std
        )
        advantages[several] = found.squeeze(-1)
    return advantages


def _less_length(rewards: Tensor, facts: Sequence[RewardFacts], options: HindsightOpd) -> Tensor:
    """Rewards after what lengths take from them [N]; a reward above 0 is a right answer's."""
    lengths = torch.tensor([one.length for one in facts], dtype=rewards.dtype)
    coef = options.length_coef
    if options.length_penalty == "uniform":
        return uniform_penalty(rewards, lengths, coef=UNIFORM_COEF if coef is None else coef)
    if options.length_penalty == "anchor":
        assert options.length_anchor is not None
        anchors = torch.full_like(lengths, options.length_anchor)
        return anchor_penalty(rewards, lengths, anchors, coef=ANCHOR_COEF if coef is None else coef)
    if options.length_penalty == "group":
        coef = GROUP_COEF if coef is None else coef
        groups = group_ids([one.prompt_key for one in facts])
        found = rewards.clone()
        for group in groups.unique():
            own = groups == group
            found[own] = group_penalty(rewards[own], lengths[own], rewards[own], coef=coef)
        return found
    return rewards


def reward_metrics(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> dict[str, float]:
    """`length/` metrics of a batch's responses. With rewards also by correctness, and with a
    comparison among turns the share of the rewarded ones that had one to be compared with.
    """
    lengths = torch.tensor([one.length for one in facts])
    if "reward" not in options.needs:
        return length_metrics(lengths)
    rewards = [math.nan if one.reward is None else one.reward for one in facts]
    metrics = length_metrics(lengths, torch.tensor(rewards))
    if isinstance(options, HindsightOpd):
        known = [one for one in facts if one.reward is not None]
        if options.reward_baseline != "none":
            metrics["reward/compared_frac"] = _compared(known, options.reward_baseline)
        if options.length_penalty == "group":
            metrics["length/compared_frac"] = _compared(known, "prompt")
    return metrics


def _compared(facts: Sequence[RewardFacts], baseline: str) -> float:
    if not facts:
        return math.nan
    groups = group_ids([_group(one, baseline) for one in facts])
    return float((groups.bincount()[groups] > 1).double().mean())


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
