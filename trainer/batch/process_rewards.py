"""What each turn of a session added: the outcome at the last turn; before that, how much more the
next turn's prompt was worth than its own (ALGORITHMS 8.5, 8.6). It knows no tokens.

Shapes: S sessions of one prompt, T turns of the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch

from records.training.outcome_rewards import as_reward
from trainer.batch.prompt_groups import RewardFacts
from trainer.batch.session_groups import sessions_of
from trainer.rewards.process_value import marginal_utilities
from trainer.rewards.token_preserving import token_preserving_advantages

Values: TypeAlias = tuple[tuple[str, float | None], ...]
"""Turn ids of a session, in their order, and what each was worth before it was answered."""


def process_advantages(facts: Sequence[RewardFacts]) -> list[float]:
    """The advantage of each turn: outcomes and utilities are normalised separately over the
    sessions that began with the same prompt, earlier ones included, then each turn gets the sum of
    its own and of all later ones. A session alone keeps its outcome and utilities as they are.

    A turn outside the conversation that was valued, and the turns of a session without values, get
    only their outcome. Raises ValueError for a turn whose session has no outcome.
    """
    outcomes, starts = sessions_of(facts)
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
