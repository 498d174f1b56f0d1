"""Turns together with earlier answers to their prompts: how often a prompt passes, and how long an
answer to it may be.

An answer passes if its reward is above 0. It knows no tokens and no options.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from records.types import (
    NO_HISTORY,
    UNKNOWN_OUTCOME,
    PastAnswer,
    PromptHistory,
    ReadySample,
    SessionOutcome,
)
from trainer.rewards.groups import group_ids, group_pass_rates
from trainer.rewards.length import next_anchor

ANCHOR_ANSWERS = 8
"""Answers per pass rate that can set an anchor."""
EASY_PASS_RATE = 0.5
"""A prompt that passes at least this often counts as easy in metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """A turn as rewards compare it; `prompt_key` is equal for equal prompts of one scope, `length`
    counts the tokens of the response. `start_kl`: the response's log-prob under the policy minus
    that under the frozen start, in nats; None if not asked for. `session_id` and `session` are its
    conversation and the outcome and values of that.
    """

    reward: float | None
    step_index: int
    prompt_key: Hashable
    length: int
    turn_id: str = ""
    is_cut: bool = False
    history: PromptHistory = NO_HISTORY
    start_kl: float | None = None
    session_id: str = ""
    session: SessionOutcome = UNKNOWN_OUTCOME


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


def with_past(facts: Sequence[RewardFacts]) -> list[RewardFacts]:
    """The turns, followed by the earlier answers to their prompts, none of them twice. An answer to
    the same prompt is at the same step.
    """
    batch = {one.turn_id for one in facts}
    answers: dict[Hashable, dict[str, PastAnswer]] = {}
    steps: dict[Hashable, int] = {}
    for one in facts:
        steps.setdefault(one.prompt_key, one.step_index)
        found = answers.setdefault(one.prompt_key, {})
        for answer in one.history.recent:
            if answer.turn_id not in batch:
                found.setdefault(answer.turn_id, answer)
    past = [
        RewardFacts(
            reward=answer.reward,
            step_index=steps[prompt_key],
            prompt_key=prompt_key,
            length=answer.length,
        )
        for prompt_key, found in answers.items()
        for answer in found.values()
    ]
    return [*facts, *past]


def pass_rates(facts: Sequence[RewardFacts]) -> Tensor:
    """Of each turn's prompt, earlier answers included [N]; NaN for a turn without a reward."""
    return rates_among(with_past(facts))[: len(facts)]


def rates_among(everything: Sequence[RewardFacts]) -> Tensor:
    """The pass rate of each prompt among only these [N]; NaN for a turn without a reward."""
    rewards = reward_tensor(everything)
    known = torch.isfinite(rewards)
    rates = torch.full_like(rewards, float("nan"))
    if bool(known.any()):
        groups = group_ids([one.prompt_key for one in everything])
        rates[known] = group_pass_rates(rewards[known], groups[known])
    return rates


def reward_tensor(facts: Sequence[RewardFacts]) -> Tensor:
    """Float64 [N]; NaN for a turn without a reward."""
    values = [float("nan") if one.reward is None else one.reward for one in facts]
    return torch.tensor(values, dtype=torch.float64)


def prompt_anchor(first: Sequence[PastAnswer]) -> float | None:
    """The mean length of the answers to a prompt when it first passes often (ALGORITHMS 8.8); None
    before. `first` are the first answers to it, oldest first.
    """
    anchor = None
    for answers in _pooled(first):
        passed = sum(answer.reward is not None and answer.reward > 0 for answer in answers)
        anchor = next_anchor(
            anchor,
            pass_rate=passed / len(answers),
            mean_length=sum(answer.length for answer in answers) / len(answers),
        )
    return anchor


def _pooled(answers: Sequence[PastAnswer]) -> Iterator[list[PastAnswer]]:
    """Groups of ANCHOR_ANSWERS, in order; a smaller rest waits for more answers."""
    for start in range(0, len(answers) - ANCHOR_ANSWERS + 1, ANCHOR_ANSWERS):
        yield list(answers[start : start + ANCHOR_ANSWERS])
