"""What rewards say about the turns of a batch: their advantages, and which turns a teacher may act
on.

Turns are compared with each other and with earlier answers to their prompts, so this needs the
whole batch; it needs no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trainer.batch.process_rewards import process_advantages, utilities
from trainer.batch.prompt_groups import (
    EASY_PASS_RATE,
    RewardFacts,
    pass_rates,
    prompt_anchor,
    rates_among,
    reward_tensor,
    with_past,
)
from trainer.batch.session_groups import compared_share, session_advantages
from trainer.objectives.option_base import TeacherReach
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.objectives.policy.eligibility import eligible_samples, underperforming_share
from trainer.objectives.policy.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids
from trainer.rewards.grpo import grpo_passk_advantages, pass_at_k_rewards
from trainer.rewards.length import (
    ANCHOR_COEF,
    GROUP_COEF,
    UNIFORM_COEF,
    anchor_penalty,
    group_penalty,
    length_metrics,
    uniform_penalty,
)


def reward_advantages(
    facts: Sequence[RewardFacts], options: ObjectiveOptions, step: int = 0
) -> list[float]:
    """The reward's advantage of each turn; a turn without a reward has none and gets 0. `step`
    counts the steps before this one.
    """
    if "reward" not in options.needs:
        return [0.0] * len(facts)
    known = [one for one in facts if one.reward is not None]
    found = iter(_of_known(known, options, step))
    advantages = [0.0 if one.reward is None else next(found) for one in facts]
    return [
        0.0 if silences(one, options) else value
        for one, value in zip(facts, advantages, strict=True)
    ]


def silences(one: RewardFacts, options: ObjectiveOptions) -> bool:
    """Whether the turn teaches nothing because it was cut off at its token limit."""
    return isinstance(options, TeacherReach) and options.zero_cut_answers and one.is_cut


def _of_known(facts: Sequence[RewardFacts], options: ObjectiveOptions, step: int) -> list[float]:
    """Advantages of turns that have a reward."""
    if not isinstance(options, HindsightOpd) or not facts:
        return reward_tensor(facts).tolist()
    if options.compares_sessions:
        return session_advantages(facts, divide_by_std=options.divide_by_std)
    if options.values_turns:
        return process_advantages(facts)
    everything = list(facts) if options.charges_kl else with_past(facts)
    rates = pass_rates(facts) if options.charges_kl else rates_among(everything)
    rewards = _less_length(everything, rates, options, step)
    if options.charges_kl:
        rewards = rewards - options.reward_kl_coef * _start_kls(facts)
    if options.reward_baseline == "none":
        return rewards[: len(facts)].tolist()
    groups = group_ids([_group(one, options.reward_baseline) for one in everything])
    compare = _ahead if options.reward_baseline == "passk" else stepwise_advantages
    found = compare(rewards, groups, divide_by_std=options.divide_by_std)
    return found[: len(facts)].tolist()


def _start_kls(facts: Sequence[RewardFacts]) -> Tensor:
    """The nats that rewards are charged for [N]. Raises ValueError if they were not measured."""
    nats = [one.start_kl for one in facts if one.start_kl is not None]
    if len(nats) < len(facts):
        raise ValueError("reward_kl_coef needs log-probs of the start for every turn")
    return torch.tensor(nats, dtype=torch.float64)


def _ahead(rewards: Tensor, groups: Tensor, *, divide_by_std: bool) -> Tensor:
    """What pass@k rewards [N]: the lead of each group's best; 0 for a turn alone in its group."""
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


def _less_length(
    facts: Sequence[RewardFacts], rates: Tensor, options: HindsightOpd, step: int
) -> Tensor:
    """Rewards after length penalties [N], of turns and the earlier answers after them; `rates` are
    the pass rates of their prompts. A reward above 0 means a right answer.
    """
    rewards = _best_of(facts, options.reward_best_of)
    if options.length_penalty == "none":
        return rewards
    lengths = torch.tensor([one.length for one in facts], dtype=rewards.dtype)
    coef = _LENGTH_COEFS[options.length_penalty]
    coef = options.length_coef if options.length_coef is not None else coef
    if options.length_warmup_steps > 0:
        coef *= min(1.0, step / options.length_warmup_steps)
    if options.length_penalty == "uniform":
        found = uniform_penalty(rewards, lengths, coef=coef)
    elif options.length_penalty == "anchor":
        found = anchor_penalty(rewards, lengths, _anchors(facts, options), coef=coef)
    else:
        found = _group_penalties(rewards, lengths, facts, coef)
    if options.length_min_pass_rate is None:
        return found
    is_easy = rates >= options.length_min_pass_rate
    return torch.where(is_easy, found, rewards)


def _best_of(facts: Sequence[RewardFacts], k: int | None) -> Tensor:
    """Rewards [N], where every k answers to a prompt share their best one, those of the batch first
    and then the newest; fewer than k answers keep their own.
    """
    rewards = reward_tensor(facts)
    if k is None:
        return rewards
    prompts: dict[Hashable, list[int]] = {}
    for place, one in enumerate(facts):
        prompts.setdefault(one.prompt_key, []).append(place)
    for places in prompts.values():
        # Turns come before the earlier answers, and these go from new to old.
        whole = places[: len(places) // k * k]
        if whole:
            rewards[whole] = pass_at_k_rewards(rewards[whole], k)
    return rewards


_LENGTH_COEFS = {"uniform": UNIFORM_COEF, "group": GROUP_COEF, "anchor": ANCHOR_COEF}


def _group_penalties(
    rewards: Tensor, lengths: Tensor, facts: Sequence[RewardFacts], coef: float
) -> Tensor:
    groups = group_ids([one.prompt_key for one in facts])
    found = rewards.clone()
    for group in groups.unique():
        own = groups == group
        found[own] = group_penalty(rewards[own], lengths[own], rewards[own], coef=coef)
    return found


def _anchors(facts: Sequence[RewardFacts], options: HindsightOpd) -> Tensor:
    """Tokens that an answer to each turn's prompt may have at no cost [N]; NaN: any number."""
    if options.length_anchor != "first_pass":
        assert options.length_anchor is not None
        return torch.full((len(facts),), float(options.length_anchor), dtype=torch.float64)
    found: dict[Hashable, float | None] = {}
    for one in facts:
        if one.prompt_key not in found:
            found[one.prompt_key] = prompt_anchor(one.history.first)
    anchors = [found[one.prompt_key] for one in facts]
    return torch.tensor(
        [math.nan if anchor is None else anchor for anchor in anchors], dtype=torch.float64
    )


def reward_metrics(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> dict[str, float]:
    """`length/` metrics of a batch's responses. With rewards also by correctness and by difficulty.
    If turns are compared, also the share of the rewarded ones that had another to be compared with.
    """
    lengths = torch.tensor([one.length for one in facts])
    if "reward" not in options.needs:
        return length_metrics(lengths)
    metrics = length_metrics(lengths, reward_tensor(facts))
    metrics |= _by_difficulty(lengths, pass_rates(facts))
    if isinstance(options, HindsightOpd):
        known = [one for one in facts if one.reward is not None]
        others = known if options.charges_kl else with_past(known)
        if options.compares_sessions or options.values_turns:
            metrics["reward/compared_frac"] = compared_share(known)
        elif options.reward_baseline != "none":
            metrics["reward/compared_frac"] = _compared(known, others, options.reward_baseline)
        if options.values_turns:
            metrics["reward/utility_mean"] = _mean(
                torch.tensor(utilities(known), dtype=torch.float64)
            )
        if options.length_penalty == "group":
            metrics["length/compared_frac"] = _compared(known, others, "prompt")
        if options.charges_kl:
            metrics["reward/start_kl"] = _mean(_start_kls(facts))
        if options.length_anchor == "first_pass":
            anchored = torch.isfinite(_anchors(facts, options)).double()
            metrics["length/anchored_frac"] = _mean(anchored)
    if options.compares_prompts:
        metrics["reward/past_answers"] = float(len(with_past(facts)) - len(facts))
    return metrics


def _by_difficulty(lengths: Tensor, rates: Tensor) -> dict[str, float]:
    """Mean lengths of answers to prompts that pass often, and to those that do not."""
    return {
        "length/easy_mean": _mean(lengths[rates >= EASY_PASS_RATE].double()),
        "length/hard_mean": _mean(lengths[rates < EASY_PASS_RATE].double()),
    }


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan


def _compared(facts: Sequence[RewardFacts], others: Sequence[RewardFacts], baseline: str) -> float:
    """The share of `facts` compared with another of `others`, which begin with `facts`."""
    if not facts:
        return math.nan
    groups = group_ids([_group(one, baseline) for one in others])
    return float((groups.bincount()[groups[: len(facts)]] > 1).double().mean())


def eligible_turns(facts: Sequence[RewardFacts], options: ObjectiveOptions) -> list[bool]:
    """Turns that the teacher may act on: failed ones of prompts that rarely pass (ALGORITHMS 7.2),
    all without `pass_rate_threshold`; never those that teach nothing because they were cut off.
    """
    loud = [not silences(one, options) for one in facts]
    threshold = _threshold(options)
    if threshold is None:
        return loud
    eligible = eligible_samples(
        reward_tensor(facts), pass_rates(facts), pass_rate_threshold=threshold
    )
    return [one and other for one, other in zip(eligible.tolist(), loud, strict=True)]


def eligibility_metrics(
    facts: Sequence[RewardFacts], options: ObjectiveOptions
) -> dict[str, float]:
    """The share of prompts that rarely pass (ALGORITHMS 7.7); empty without a threshold."""
    threshold = _threshold(options)
    if threshold is None:
        return {}
    groups = group_ids([one.prompt_key for one in facts])
    share = underperforming_share(pass_rates(facts), groups, pass_rate_threshold=threshold)
    return {"opd/frac_underperforming_prompts": share}


def _threshold(options: ObjectiveOptions) -> float | None:
    return options.pass_rate_threshold if isinstance(options, TeacherReach) else None


def _group(one: RewardFacts, baseline: str) -> Hashable:
    """What a turn is compared with: turns at the same step, or after the same prompt."""
    return one.step_index if baseline == "step" else one.prompt_key
