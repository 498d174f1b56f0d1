"""Sessions compared with earlier ones that began with the same prompt: each is one answer to a
task, and all of its turns share its advantage. It knows no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from records.training.outcome_rewards import as_reward
from trainer.batch.prompt_groups import RewardFacts
from trainer.objectives.policy.stepwise import stepwise_advantages
from trainer.rewards.groups import group_ids


def session_advantages(facts: Sequence[RewardFacts], *, divide_by_std: bool) -> list[float]:
    """(o - mean) / (std + 1e-6) of each turn's session, among all sessions that began with the same
    prompt, including earlier ones, each counted once (ALGORITHMS 8.7). A session that is alone gets
    0. Raises ValueError for a turn whose session has no outcome.
    """
    outcomes, starts = sessions_of(facts)
    if not outcomes:
        return []
    rewards = torch.tensor([as_reward(one) for one in outcomes.values()], dtype=torch.float64)
    groups = group_ids([starts[session_id] for session_id in outcomes])
    found = stepwise_advantages(rewards, groups, divide_by_std=divide_by_std)
    of_sessions = dict(zip(outcomes, found.tolist(), strict=True))
    return [of_sessions[one.session_id] for one in facts]


def compared_share(facts: Sequence[RewardFacts]) -> float:
    """The share of turns whose session is compared with another one; NaN without turns."""
    outcomes, starts = sessions_of(facts)
    if not facts:
        return math.nan
    sizes: dict[Hashable, int] = {}
    for session_id in outcomes:
        sizes[starts[session_id]] = sizes.get(starts[session_id], 0) + 1
    return sum(sizes[starts[one.session_id]] > 1 for one in facts) / len(facts)


def sessions_of(
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
