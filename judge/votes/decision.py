"""From a turn's votes to its verdict: its hints, its reward, and whether it goes on.

Pure. A hint goes to the teacher; a reward alone (ALGORITHMS 3.1, 3.2) goes straight to the trainer,
and so does a turn whose reward is its session's outcome; with neither, the turn is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from judge.config import JudgeConfig, RewardKind
from judge.votes.rewards import majority_reward, parse_reward
from judge.votes.selection import select_hints
from records.names import UNJUDGED, DropReason
from records.types import Verdict, Vote


def decide(
    turn_id: str,
    votes: Sequence[Vote],
    config: JudgeConfig,
    *,
    num_omitted: int,
    drop: DropReason | None = None,
    said: float | None = None,
    judge: str | None = None,
) -> tuple[Verdict, DropReason | None]:
    """The verdict on a turn, and why it is dropped, if it is; `drop` is a reason found earlier.

    `said` is the reward that a person gave the turn (feedback), on [-1, 1]. `judge` names who
    voted, if not the configured one.
    """
    hints: tuple[str, ...] = ()
    reward = None
    if config.reward == "outcome" and drop in UNJUDGED:
        drop = None  # a session's outcome needs no votes
    if drop is None:
        hints = select_hints(
            votes,
            config.selection,
            min_positive_votes=config.min_positive_votes,
            max_candidates=config.max_candidates,
        )
        reward = reward_of(votes, config.reward, said)
        if not hints and reward is None and config.reward != "outcome":
            drop = why_no_hint(votes, config.min_positive_votes)
    verdict = Verdict(
        turn_id=turn_id,
        votes=tuple(votes),
        hint=hints[0] if hints else None,
        selection=config.selection,
        judge=judge or config.model,
        num_omitted=num_omitted,
        candidates=hints,
        reward=reward,
        awaits_outcome=drop is None and config.reward == "outcome",
    )
    return verdict, drop


def why_no_hint(votes: Sequence[Vote], min_positive_votes: int) -> DropReason:
    """Why votes that selected no hint gave none."""
    positive = [vote for vote in votes if vote.score == 1]
    if positive and len(positive) < min_positive_votes:
        return DropReason.NO_QUORUM
    if any(vote.rejected is not None for vote in positive):
        return DropReason.HINT_REJECTED
    return DropReason.NO_HINT


def reward_of(votes: Sequence[Vote], kind: RewardKind, said: float | None = None) -> float | None:
    """The majority of the votes 1, 0 and -1, or their mean; None if all abstained, and for `none`
    and `outcome`.

    A vote of 0 abstains on the hint, but counts here. What a person `said` replaces the votes;
    `verdict` takes its sign.
    """
    if kind in ("none", "outcome"):
        return None
    if said is not None:
        return said if kind == "votes" else float((said > 0) - (said < 0))
    scores = [score for score in map(_reward_vote, votes) if score is not None]
    if not scores:
        return None
    return majority_reward(scores) if kind == "verdict" else sum(scores) / len(scores)


def _reward_vote(vote: Vote) -> int | None:
    return vote.score if vote.score is not None else parse_reward(vote.text)


def is_reviewed(turn_id: str, config: JudgeConfig) -> bool:
    """Whether a hint of this turn waits for a person: the same each time the turn is judged."""
    if config.review == "none":
        return False
    if config.review == "all":
        return True
    drawn = int.from_bytes(hashlib.sha256(turn_id.encode()).digest()[:8]) / 2**64
    return drawn < config.review_share
