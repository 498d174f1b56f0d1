"""What a turn's reward is compared with: earlier answers to its prompt, other sessions that began
alike, and the values of its session's turns.

How often a prompt passes, and how long an answer to it may be: an answer passes if its reward is
above 0. Sessions compared with each other: each is one answer to a task, and all of its turns share
its advantage. What each turn of a session added: the outcome at the last turn; before that, how
much more the next turn's prompt was worth than its own (ALGORITHMS 8.5, 8.6). It knows no tokens
and no options.

Shapes: N turns, S sessions of one prompt, T turns of the longest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from records.training.outcome_rewards import as_reward
from records.types import (
    NO_HISTORY,
    UNKNOWN_OUTCOME,
    PastAnswer,
    PromptHistory,
    SessionOutcome,
)
from trainer.rewards.groups import group_ids, group_pass_rates, stepwise_advantages
from trainer.rewards.process import marginal_utilities, token_preserving_advantages

Values: TypeAlias = tuple[tuple[str, float | None], ...]
"""Turn ids of a session, in their order, and what each was worth before it was answered."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A batch's turns, then the earlier answers to their prompts, which `everything` names one by
    one; all tensors are [N]. `rewards` are NaN for a turn without one, `prompts` number the
    prompts, `rates` are how often each one passes, NaN for a turn without a reward. `known` are the
    places of the turns with a reward, `answers` those of the earlier answers to their prompts.
    """

    num_turns: int
    everything: list[RewardFacts]
    rewards: Tensor
    prompts: Tensor
    rates: Tensor
    known: list[int]
    answers: list[int]


def compare(turns: Sequence[RewardFacts]) -> Comparison:
    """A batch's turns beside the earlier answers to their prompts."""
    everything = with_past(turns)
    values = [math.nan if one.reward is None else one.reward for one in everything]
    rewards = torch.tensor(values, dtype=torch.float64)
    prompts = group_ids([one.prompt_key for one in everything])
    rates = torch.full_like(rewards, math.nan)
    is_known = torch.isfinite(rewards)
    if bool(is_known.any()):
        rates[is_known] = group_pass_rates(rewards[is_known], prompts[is_known])
    known = [place for place, one in enumerate(turns) if one.reward is not None]
    asked = {turns[place].prompt_key for place in known}
    past = range(len(turns), len(everything))
    return Comparison(
        num_turns=len(turns),
        everything=everything,
        rewards=rewards,
        prompts=prompts,
        rates=rates,
        known=known,
        answers=[place for place in past if everything[place].prompt_key in asked],
    )


def session_advantages(facts: Sequence[RewardFacts], *, divide_by_std: bool) -> list[float]:
    """(o - mean) / (std + 1e-6) of each turn's session, among all sessions that began with the same
    prompt, including earlier ones, each counted once (ALGORITHMS 8.7). A session that is alone gets
    0. Raises ValueError for a turn whose session has no outcome.
    """
    outcomes, starts = _sessions(facts)
    if not outcomes:
        return []
    rewards = torch.tensor([as_reward(one) for one in outcomes.values()], dtype=torch.float64)
    groups = group_ids([starts[session_id] for session_id in outcomes])
    found = stepwise_advantages(rewards, groups, divide_by_std=divide_by_std)
    of_sessions = dict(zip(outcomes, found.tolist(), strict=True))
    return [of_sessions[one.session_id] for one in facts]


def compared_share(facts: Sequence[RewardFacts]) -> float:
    """The share of turns whose session is compared with another one; NaN without turns."""
    outcomes, starts = _sessions(facts)
    if not facts:
        return math.nan
    sizes: dict[Hashable, int] = {}
    for session_id in outcomes:
        sizes[starts[session_id]] = sizes.get(starts[session_id], 0) + 1
    return sum(sizes[starts[one.session_id]] > 1 for one in facts) / len(facts)


def _sessions(
    facts: Sequence[RewardFacts],
) -> tuple[dict[str, float], dict[str, Hashable]]:
    """The outcome of each session, those of the batch first, and the prompt that it began with.
    Raises ValueError for a turn whose session has no outcome.
    """
    outcomes: dict[str, float] = {}
    starts: dict[str, Hashable] = {}
    for one in facts:
        if one.session.outcome is None:
            raise ValueError(f"turn {one.turn_id}: its session has no outcome")
        outcomes[one.session_id] = one.session.outcome
        starts[one.session_id] = one.session.start or one.session_id
    for one in facts:
        for past in one.session.past:
            if past.session_id not in outcomes:
                outcomes[past.session_id] = past.outcome
                starts[past.session_id] = one.session.start
    return outcomes, starts


def process_advantages(facts: Sequence[RewardFacts]) -> list[float]:
    """The advantage of each turn: outcomes and utilities are normalised separately over the
    sessions that began with the same prompt, earlier ones included, then each turn gets the sum of
    its own and of all later ones. A session alone keeps its outcome and utilities as they are.

    A turn outside the conversation that was valued, and the turns of a session without values, get
    only their outcome. Raises ValueError for a turn whose session has no outcome.
    """
    outcomes, starts = _sessions(facts)
    values: dict[str, Values] = {}
    for one in facts:
        values[one.session_id] = one.session.values
    for one in facts:
        for past in one.session.past:
            values.setdefault(past.session_id, past.values)
    groups: dict[Hashable, list[str]] = {}
    for session_id in outcomes:
        groups.setdefault(starts[session_id], []).append(session_id)
    # What each session's places get, right-aligned: the last is that of its last turn.
    found: dict[str, list[float]] = {}
    for session_ids in groups.values():
        rewards = [[*_utilities(values[one]), as_reward(outcomes[one])] for one in session_ids]
        found |= dict(zip(session_ids, _normalised(rewards), strict=True))
    return [found[one.session_id][_column(one)] for one in facts]


def _normalised(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """The advantages of one group's sessions; the outcome is the last of each."""
    longest = max(map(len, rewards))
    padded = [[0.0] * (longest - len(row)) + [*row] for row in rewards]
    mask = [[0.0] * (longest - len(row)) + [1.0] * len(row) for row in rewards]
    found_ST = token_preserving_advantages(
        torch.tensor(padded, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)
    ).advantages
    return found_ST.tolist()


def _utilities(values: Values) -> list[float]:
    """What each valued turn of a session except the last added; 0, which counts as no reward,
    where a value is unknown.
    """
    if len(values) < 2:
        return []
    known = torch.tensor(
        [float("nan") if value is None else value for _, value in values], dtype=torch.float64
    )
    return torch.nan_to_num(marginal_utilities(known), nan=0.0).tolist()


def _column(one: RewardFacts) -> int:
    """The place of a turn, from the end: the last, minus the number of turns after it."""
    turn_ids = [turn_id for turn_id, _ in one.session.values]
    if one.turn_id not in turn_ids:
        return -1
    return turn_ids.index(one.turn_id) - len(turn_ids)


def utilities(facts: Sequence[RewardFacts]) -> list[float]:
    """What each turn added, if the values of its own and of the next prompt are known."""
    found = []
    for one in facts:
        values = one.session.values
        for (turn_id, value), (_, following) in itertools.pairwise(values):
            if turn_id == one.turn_id and value is not None and following is not None:
                found.append(following - value)
    return found
