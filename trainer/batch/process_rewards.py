"""What each turn of a session added: the outcome at the last turn; before that, how much more the
next turn's prompt was worth than its own (ALGORITHMS 8.5, 8.6). It knows no tokens.

Shapes: S sessions, T turns of the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from records.training.outcome_rewards import as_reward
from trainer.batch.prompt_groups import RewardFacts
from trainer.rewards.process_value import marginal_utilities
from trainer.rewards.token_preserving import token_preserving_advantages


def process_advantages(facts: Sequence[RewardFacts]) -> list[float]:
    """The advantage of each turn: outcomes and utilities are normalised separately over the
    sessions of the batch, then each turn gets the sum of its own and of all later ones.

    A turn outside the conversation that was valued, and the turns of a session without values, get
    only their outcome. Raises ValueError for a turn whose session has no outcome.
    """
    if not facts:
        return []
    rewards: dict[str, list[float]] = {}
    for one in facts:
        if one.session.outcome is None:
            raise ValueError(f"turn {one.turn_id}: its session has no outcome")
        outcome = as_reward(one.session.outcome)
        rewards.setdefault(one.session_id, [*_utilities(one), outcome])
    longest = max(map(len, rewards.values()))
    # Right-aligned: the outcome is in the last column of every session.
    padded = [[0.0] * (longest - len(row)) + row for row in rewards.values()]
    mask = [[0.0] * (longest - len(row)) + [1.0] * len(row) for row in rewards.values()]
    found_ST = token_preserving_advantages(
        torch.tensor(padded, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)
    ).advantages
    rows = {session_id: found_ST[place] for place, session_id in enumerate(rewards)}
    return [float(rows[one.session_id][_column(one, longest)]) for one in facts]


def _utilities(one: RewardFacts) -> list[float]:
    """What each valued turn of the session except the last added; 0, which counts as no reward,
    where a value is unknown.
    """
    values = [value for _, value in one.session.values]
    if len(values) < 2:
        return []
    known = torch.tensor(
        [float("nan") if value is None else value for value in values], dtype=torch.float64
    )
    return torch.nan_to_num(marginal_utilities(known), nan=0.0).tolist()


def _column(one: RewardFacts, longest: int) -> int:
    """The column of a turn: the last, minus the number of turns after it."""
    turn_ids = [turn_id for turn_id, _ in one.session.values]
    if one.turn_id not in turn_ids:
        return longest - 1
    return longest - len(turn_ids) + turn_ids.index(one.turn_id)


def utilities(facts: Sequence[RewardFacts]) -> list[float]:
    """What each turn added, if the values of its own and of the next prompt are known."""
    found = []
    for one in facts:
        values = one.session.values
        for (turn_id, value), (_, following) in itertools.pairwise(values):
            if turn_id == one.turn_id and value is not None and following is not None:
                found.append(following - value)
    return found
