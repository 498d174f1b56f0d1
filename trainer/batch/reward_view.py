"""What rewards say about the turns of a batch: their advantages, which turns a teacher may act on,
and the metrics of rewards and lengths.

Turns are compared with each other and with earlier answers to their prompts (comparisons.py), so
this needs the whole batch; it needs no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import ReadySample
from trainer.batch.comparisons import (
    Comparison,
    RewardFacts,
    compare,
    compared_share,
    process_advantages,
    session_advantages,
    utilities,
)
from trainer.objectives.option_base import TeacherReach
from trainer.objectives.options import HindsightOpd, ObjectiveOptions
from trainer.rewards.groups import (
    best_of_each,
    eligible_samples,
    grpo_passk_advantages,
    members,
    stepwise_advantages,
    underperforming_share,
)
from trainer.rewards.length import penalise_lengths, prompt_anchor

EASY_PASS_RATE = 0.5
"""A prompt that passes at least this often counts as easy in metrics."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardView:
    """What rewards say about each turn of a batch: its reward's `advantages` (0 without a reward),
    and whether the teacher may act on it, `eligible`. `metrics` are those of rewards and lengths.
    """

    advantages: list[float]
    eligible: list[bool]
    metrics: dict[str, float]


def view_rewards(
    facts: Sequence[RewardFacts], options: ObjectiveOptions, step: int = 0
) -> RewardView:
    """What rewards say about `facts`; `step` counts the steps before this one. Raises ValueError
    where `options` ask for something that was not measured.
    """
    comparison = compare(facts)
    found, compared = _of_known(comparison, options, step)
    advantages = [0.0] * len(facts)
    for place, value in zip(comparison.known, found, strict=True):
        advantages[place] = value
    eligible, share = _eligible(comparison, options)
    lengths = torch.tensor([one.length for one in facts])
    if options.reward_coef == 0:
        metrics = length_metrics(lengths)
    else:
        metrics = length_metrics(lengths, comparison.rewards[: len(facts)])
        metrics |= share | compared | _by_difficulty(lengths, comparison.rates[: len(facts)])
        if options.compares_prompts:
            metrics["reward/past_answers"] = float(len(comparison.everything) - len(facts))
    silent = [_teaches_nothing(one, options) for one in facts]
    return RewardView(
        advantages=[0.0 if cut else one for one, cut in zip(advantages, silent, strict=True)],
        eligible=[one and not cut for one, cut in zip(eligible, silent, strict=True)],
        metrics=metrics,
    )


def _teaches_nothing(one: RewardFacts, options: ObjectiveOptions) -> bool:
    """Because it was cut off at its token limit."""
    return isinstance(options, TeacherReach) and options.zero_cut_answers and one.is_cut


def _of_known(
    comparison: Comparison, options: ObjectiveOptions, step: int
) -> tuple[list[float], dict[str, float]]:
    """The advantages of the turns that have a reward, in order; metrics of what they were compared
    with.
    """
    if options.reward_coef == 0:
        return [0.0] * len(comparison.known), {}
    if not isinstance(options, HindsightOpd):
        return comparison.rewards[comparison.known].tolist(), {}
    if options.compares_sessions or options.values_turns:
        return _among_sessions([comparison.everything[at] for at in comparison.known], options)
    return _among_answers(comparison, options, step)


def _among_sessions(
    known: Sequence[RewardFacts], options: HindsightOpd
) -> tuple[list[float], dict[str, float]]:
    """Each turn compared by its session's outcome, or by what it added to that."""
    metrics = {"reward/compared_frac": compared_share(known)}
    if not options.values_turns:
        return session_advantages(known, divide_by_std=options.divide_by_std), metrics
    added = torch.tensor(utilities(known), dtype=torch.float64)
    return process_advantages(known), metrics | {"reward/utility_mean": _mean(added)}


def _among_answers(
    comparison: Comparison, options: HindsightOpd, step: int
) -> tuple[list[float], dict[str, float]]:
    """Each turn compared with other answers to its prompt, or with turns at the same step."""
    num_known, turns = len(comparison.known), comparison.everything[: comparison.num_turns]
    places = comparison.known + ([] if options.charges_kl else comparison.answers)
    prompts = comparison.prompts[places]
    anchors = None if options.length_penalty != "anchor" else _anchors(comparison, options)
    rewards = _less_length(comparison, places, anchors, options, step)
    metrics = {}
    if options.charges_kl:
        nats = _start_kls(turns)
        rewards = rewards - options.reward_kl_coef * nats[comparison.known]
        metrics["reward/start_kl"] = _mean(nats)
    if options.length_penalty == "group":
        metrics["length/compared_frac"] = _compared(prompts, num_known)
    if options.length_anchor == "first_pass" and anchors is not None:
        anchored = torch.isfinite(anchors[: comparison.num_turns]).double()
        metrics["length/anchored_frac"] = _mean(anchored)
    if options.reward_baseline == "none":
        return rewards[:num_known].tolist(), metrics
    groups = prompts
    if options.reward_baseline == "step":
        steps = [comparison.everything[place].step_index for place in places]
        groups = torch.tensor(steps, dtype=torch.int64)
    metrics["reward/compared_frac"] = _compared(groups, num_known)
    if not num_known:
        return [], metrics
    among_group = _ahead if options.reward_baseline == "passk" else stepwise_advantages
    found = among_group(rewards, groups, divide_by_std=options.divide_by_std)
    return found[:num_known].tolist(), metrics


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
    comparison: Comparison,
    places: Sequence[int],
    anchors: Tensor | None,
    options: HindsightOpd,
    step: int,
) -> Tensor:
    """The rewards at `places`, turns before earlier answers, after length penalties [N]. A reward
    above 0 means a right answer. `anchors` are those of everything, for that penalty.
    """
    at = torch.tensor(places, dtype=torch.int64)
    rewards, prompts = comparison.rewards[at], members(comparison.prompts[at])
    if options.reward_best_of is not None:
        # Turns come before the earlier answers, and these go from new to old.
        rewards = best_of_each(rewards, prompts, options.reward_best_of)
    if options.length_penalty == "none":
        return rewards
    facts = [comparison.everything[place] for place in places]
    found = penalise_lengths(
        options.length_penalty,
        rewards,
        torch.tensor([one.length for one in facts], dtype=rewards.dtype),
        prompts,
        None if anchors is None else anchors[at],
        coef=options.length_coef,
        share=min(1.0, step / options.length_warmup_steps) if options.length_warmup_steps else 1.0,
    )
    if options.length_min_pass_rate is None:
        return found
    return torch.where(comparison.rates[at] >= options.length_min_pass_rate, found, rewards)


def _anchors(comparison: Comparison, options: HindsightOpd) -> Tensor:
    """Tokens that an answer to each one's prompt may have at no cost [N]; NaN: any number."""
    facts = comparison.everything
    if options.length_anchor != "first_pass":
        assert options.length_anchor is not None
        return torch.full((len(facts),), float(options.length_anchor), dtype=torch.float64)
    found: dict[Hashable, float | None] = {}
    for one in facts:
        # Turns come first; earlier answers have no history of their own.
        if one.prompt_key not in found:
            first = [(answer.reward, answer.length) for answer in one.history.first]
            found[one.prompt_key] = prompt_anchor(first)
    anchors = [found[one.prompt_key] for one in facts]
    return torch.tensor(
        [math.nan if anchor is None else anchor for anchor in anchors], dtype=torch.float64
    )


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


def _compared(groups: Tensor, num_known: int) -> float:
    """The share of the first `num_known` that have another one in their group; NaN without any."""
    return _mean((groups.bincount()[groups[:num_known]] > 1).double())


def _eligible(
    comparison: Comparison, options: ObjectiveOptions
) -> tuple[list[bool], dict[str, float]]:
    """Failed turns of prompts that rarely pass (ALGORITHMS 7.2), and the share of such prompts
    (7.7); all turns without `pass_rate_threshold`.
    """
    threshold = options.pass_rate_threshold if isinstance(options, TeacherReach) else None
    if threshold is None:
        return [True] * comparison.num_turns, {}
    turns = slice(comparison.num_turns)
    rates, prompts = comparison.rates[turns], comparison.prompts[turns]
    share = underperforming_share(rates, prompts, pass_rate_threshold=threshold)
    eligible = eligible_samples(comparison.rewards[turns], rates, pass_rate_threshold=threshold)
    return eligible.tolist(), {"opd/frac_underperforming_prompts": share}
