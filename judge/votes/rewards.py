r"""Verdicts on a turn as a reward of 1, 0 or -1 (ALGORITHMS 3.1).

The decision has the same pattern as the hint judge's (judge/votes/parsing.py), but 0 is a legal
vote here. Independent of tokens and HTTP.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

REWARDS = (1, 0, -1)
_DECISION = re.compile(r"\\boxed\{([-+]?[0-9])\}")


def parse_reward(text: str) -> int | None:
    r"""The last `\boxed{..}` of a judge's answer if it is 1, 0 or -1; else None, an abstention."""
    decisions = _DECISION.findall(text)
    score = int(decisions[-1]) if decisions else None
    return score if score in REWARDS else None


def majority_reward(votes: Iterable[int | None]) -> float:
    """The most frequent of the votes 1, 0 and -1; 0 on a tie for first place or without votes.

    None and every other value abstain.
    """
    counts = Counter(vote for vote in votes if vote in REWARDS)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    return float(winners[0]) if len(winners) == 1 else 0.0
