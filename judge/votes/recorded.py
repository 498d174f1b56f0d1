"""Votes that came with a recording: a judge's texts, read as if it had just written them."""

from __future__ import annotations

from collections.abc import Sequence

from judge.votes.parsing import parse_answer
from judge.votes.voting import Ballot
from records.types import Vote

NAME = "recorded votes"
"""What verdicts have in place of the judge's name."""


def recorded_ballot(texts: Sequence[str]) -> Ballot:
    """The votes in the order of the recording. What was not measured is None."""
    votes = []
    for index, text in enumerate(texts):
        score, hint = parse_answer(text)
        votes.append(
            Vote(
                index=index,
                score=score,
                hint=hint,
                text=text,
                latency_s=None,
                prompt_tokens=None,
                completion_tokens=None,
            )
        )
    return Ballot(votes=tuple(votes), retry_after_s=None, refused_as_too_long=False)
