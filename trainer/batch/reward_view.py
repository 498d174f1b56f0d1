"""What rewards say about the turns of a batch: their advantages, which turns a teacher may act on,
and the metrics of rewards and lengths.

Turns are compared with each other and with earlier answers to their prompts (comparisons.py), so
this needs the whole batch; it needs no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from records.types import ReadySample
from trainer.batch.comparisons import (
    EASY_PASS_RATE,
    RewardFacts,
    compared_share,
    pass_rates,
    process_advantages,
    prompt_anchor,
    rates_among,
    reward_tensor,
    session_advantages,
    utilities,
    with_past,
)
from trainer.objectives.option_base import TeacherReach
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.rewards.groups import eligible_samples, group_ids, underperforming_share
from trainer.rewards.grpo import grpo_passk_advantages, pass_at_k_rewards, stepwise_advantages
from trainer.rewards.length import (
    ANCHOR_COEF,
    GROUP_COEF,
    UNIFORM_COEF,
    anchor_penalty,
    group_penalty,
    uniform_penalty,
)

QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Of the lengths of a batch, in metrics."""


def reward_facts(
    samples: Sequence[ReadySample], start_kls: Sequence[float] | None = None
) -> list[RewardFacts]:
    """Those of ready samples, in order."""
    kls = [None] * len(samples) if start_kls is None else start_kls
    return [
        RewardFacts(
            reward=sample.reward,
            step_index=sample.step_index,
            prompt_key=(sample.scope, sample.prompt_ids.tobytes()),
            length=len(sample.response_ids),
            turn_id=sample.turn_id,
            is_cut=sample.is_cut,
            history=sample.history,
            start_kl=start_kl,
            session_id=sample.session_id,
            session=sample.session,
        )
        for sample, start_kl in zip(samples, kls, strict=True)
    ]


def what_rewards_say(
    samples: Sequence[ReadySample],
    options: ObjectiveOptions,
    *,
    start_kls: Sequence[float] | None = None,
    step: int = 0,
) -> list[tuple[float, bool]]:
    """Of each sample its reward's advantage, and whether the teacher may act on it."""
    facts = reward_facts(samples, start_kls)
    advantages, eligible = reward_advantages(facts, options, step), eligible_turns(facts, options)
    return list(zip(advantages, eligible, strict=True))


def reward_advantages(
    facts: Sequence[RewardFacts], options: ObjectiveOptions, step: int = 0
) -> list[float]:
    """The reward's advantage of each turn; a turn without a reward has none and gets 0. `step`
    counts the steps before this one.
    """
    if options.reward_coef == 0:
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
    if options.reward_coef == 0:
        return length_metrics(lengths)
    metrics = length_metrics(lengths, reward_tensor(facts)) | _eligibility_metrics(facts, options)
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


@torch.no_grad()
def length_metrics(lengths_N: Tensor, correct_N: Tensor | None = None) -> dict[str, float]:
    """Mean, extremes and quantiles, and the share of empty responses; NaN without samples.

    With `correct_N` (above 0: correct) also the mean of either kind and their difference, wrong
    minus correct; a NaN is neither.
    """
    lengths = lengths_N.to(torch.float64)
    metrics = {
        "length/mean": _mean(lengths),
        "length/min": float(lengths.min()) if len(lengths) else float("nan"),
        "length/max": float(lengths.max()) if len(lengths) else float("nan"),
        "length/empty_frac": _mean((lengths == 0).double()),
    }
    for quantile in QUANTILES:
        value = float(torch.quantile(lengths, quantile)) if len(lengths) else float("nan")
        metrics[f"length/p{round(100 * quantile)}"] = value
    if correct_N is not None:
        correct = _mean(lengths[correct_N > 0])
        wrong = _mean(lengths[correct_N <= 0])
        metrics |= {
            "length/correct_mean": correct,
            "length/wrong_mean": wrong,
            "length/wrong_minus_correct": wrong - correct,
        }
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


def _eligibility_metrics(
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
