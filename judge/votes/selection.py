"""Which hint a turn gets from its votes (ALGORITHMS 1.4, 1.5).

A strategy is a function from votes to candidates, best first, registered under the name that the
configuration uses. The first candidate is the hint that is selected; all are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from records.types import Vote

MIN_HINT_CHARS = 11
MAX_CANDIDATES = 3

Selection: TypeAlias = Callable[[Sequence[Vote], int], list[Vote]]


def valid_votes(votes: Sequence[Vote]) -> list[Vote]:
    """Positive votes whose stripped hint has more than 10 characters and was not rejected."""
    return [
        vote
        for vote in votes
        if vote.score == 1 and vote.rejected is None and len(vote.hint.strip()) >= MIN_HINT_CHARS
    ]


def longest(votes: Sequence[Vote], max_candidates: int = 1) -> list[Vote]:
    """The valid vote with the longest stripped hint; of equally long ones the first (1.4).

    It never gives more than one candidate.
    """
    valid = valid_votes(votes)
    return [max(valid, key=lambda vote: len(vote.hint.strip()))] if valid else []


def longest_first(votes: Sequence[Vote], max_candidates: int = MAX_CANDIDATES) -> list[Vote]:
    """Valid votes with different stripped hints, at most `max_candidates`: the one that `longest`
    gives, then those that take its place if the teacher finds that it asks for what the answer
    already did (`scoring.least_fall`).
    """
    by_length = sorted(_of_each_hint(votes), key=lambda vote: -len(vote.hint.strip()))
    return by_length[:max_candidates]


def shortest_first(votes: Sequence[Vote], max_candidates: int = MAX_CANDIDATES) -> list[Vote]:
    """Valid votes with different stripped hints, shortest first, at most `max_candidates` (1.5)."""
    by_length = sorted(_of_each_hint(votes), key=lambda vote: len(vote.hint.strip()))
    return by_length[:max_candidates]


def _of_each_hint(votes: Sequence[Vote]) -> list[Vote]:
    first_of_each: dict[str, Vote] = {}
    for vote in valid_votes(votes):
        first_of_each.setdefault(vote.hint.strip(), vote)
    return list(first_of_each.values())


SELECTIONS: dict[str, Selection] = {
    "longest": longest,
    "longest_first": longest_first,
    "shortest_first": shortest_first,
}


def select_hints(
    votes: Sequence[Vote],
    strategy: str,
    *,
    min_positive_votes: int = 1,
    max_candidates: int = MAX_CANDIDATES,
) -> tuple[str, ...]:
    """The stripped hints of the candidates, best first, at most `max_candidates`.

    With `min_positive_votes` above the source's 1, fewer positive votes (with or without a usable
    hint) mean no hint: a single mistaken vote of m then trains nothing. Raises ValueError for an
    unknown strategy.
    """
    if strategy not in SELECTIONS:
        raise ValueError(
            f"unknown hint selection {strategy!r}; known: {', '.join(sorted(SELECTIONS))}"
        )
    if sum(vote.score == 1 for vote in votes) < min_positive_votes:
        return ()
    candidates = SELECTIONS[strategy](votes, max_candidates)
    return tuple(vote.hint.strip() for vote in candidates)
