"""Counts of the judge's votes and verdicts, under the names of ALGORITHMS 1.8.

Counted where verdicts are committed, so each turn counts once however often it was attempted.
Prometheus names cannot contain a slash: `hint/vote_none` is exposed as `hint_vote_none_total`. The
store's vote summary gives the same figures for a whole run; these are for the running process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from judge.votes.capacity import Capacity
from records.names import DropReason, HintRejection
from records.types import Verdict, Vote


def agreement(votes: Sequence[Vote]) -> float | None:
    """Share of the pairs of decided votes (+1, -1) that agree; None for fewer than two of them."""
    num_positive = sum(vote.score == 1 for vote in votes)
    num_negative = sum(vote.score == -1 for vote in votes)
    num_pairs = math.comb(num_positive + num_negative, 2)
    if not num_pairs:
        return None
    return (math.comb(num_positive, 2) + math.comb(num_negative, 2)) / num_pairs


class HintMetrics:
    """Counters of one judge worker."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.votes = {
            None: self._counter("hint_vote_none", "Votes that abstained or failed"),
            1: self._counter("hint_vote_pos", "Votes that the next state shows a better response"),
            -1: self._counter(
                "hint_vote_neg", "Votes that the next state shows no better response"
            ),
        }
        self.vote_failed = self._counter("hint_vote_failed", "Votes whose call failed")
        self.turns = self._counter("hint_turns", "Turns judged")
        self.accepted = self._counter("hint_accepted", "Turns that got a hint")
        self.split = self._counter(
            "hint_votes_split", "Turns with both positive and negative votes"
        )
        self.agreement = self._counter(
            "hint_agreement",
            "Share of pairs of decided votes that agree, summed over the turns that have a pair",
        )
        self.compared = self._counter(
            "hint_agreement_turns", "Turns with at least two decided votes"
        )
        self.minority = self._counter(
            "hint_minority", "Turns that got a hint although at most half of their votes ask for it"
        )
        self.rejected = Counter(
            "hint_rejected", "Hints refused, by reason", ["reason"], registry=self.registry
        )
        for reason in HintRejection:
            self.rejected.labels(reason=reason.value)
        self.dropped = Counter(
            "hint_dropped", "Turns dropped by the judge", ["reason"], registry=self.registry
        )
        self.omitted_messages = self._counter(
            "hint_omitted_messages", "Conversation messages left out of judge prompts"
        )
        self.len_chars = self._counter("hint_len_chars", "Characters of accepted hints, summed")
        self.prompt_tokens = self._counter("hint_prompt_tokens", "Prompt tokens of votes")
        self.cached_tokens = self._counter(
            "hint_cached_tokens", "Prompt tokens of votes that the judge had in its cache"
        )
        self.completion_tokens = self._counter("hint_completion_tokens", "Answer tokens of votes")
        self.vote_latency = Histogram(
            "hint_vote_latency_seconds", "Duration of a vote's call", registry=self.registry
        )
        self.rewards = {
            sign: self._counter(f"reward_{name}", f"Turns whose reward is {name}")
            for sign, name in ((1, "positive"), (0, "zero"), (-1, "negative"))
        }
        self.without_hint = self._counter(
            "reward_without_hint", "Turns that go on with a reward and no hint"
        )
        self.unavailable = Gauge(
            "hint_judge_failures_in_a_row",
            "Failures of the judge since its last answer",
            registry=self.registry,
        )

        self.waiting_s = Gauge(
            "judge_waiting_seconds",
            "Age of the oldest turn that waits for the judge and can still train; 0 if none does",
            registry=self.registry,
        )

    def watch(self, capacity: Capacity) -> None:
        """Expose the judge's pace, and the share of turns that it judges in time."""
        for name, text, figure in (
            (
                "judge_sampled_share",
                "Share of the turns of the last five minutes that were judged while they could "
                "still train; NaN if there were none",
                capacity.share,
            ),
            (
                "judge_turns_per_second",
                "Turns judged while they could still train, mean of the last five minutes",
                capacity.turns_per_second,
            ),
        ):
            Gauge(name, text, registry=self.registry).set_function(figure)

    def count_let_go(self, number: int, waiting_s: float | None) -> None:
        """Count turns that were dropped unjudged, and note how long the oldest of the others has
        waited.
        """
        if number:
            self.dropped.labels(reason=DropReason.OVER_CAPACITY.value).inc(number)
        self.waiting_s.set(waiting_s or 0.0)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def count(self, verdict: Verdict, drop: DropReason | None) -> None:
        """Add one committed verdict."""
        self.turns.inc()
        self.omitted_messages.inc(verdict.num_omitted)
        for vote in verdict.votes:
            self.votes[vote.score].inc()
            self.vote_failed.inc(vote.error is not None)
            if vote.rejected is not None:
                self.rejected.labels(reason=vote.rejected.value).inc()
            if vote.latency_s is not None:
                self.vote_latency.observe(vote.latency_s)
            self.prompt_tokens.inc(vote.prompt_tokens or 0)
            self.completion_tokens.inc(vote.completion_tokens or 0)
        self.split.inc({1, -1} <= {vote.score for vote in verdict.votes})
        share = agreement(verdict.votes)
        if share is not None:
            self.compared.inc()
            self.agreement.inc(share)
        if drop is not None:
            self.dropped.labels(reason=drop.value).inc()
        elif verdict.hint is not None:
            self.accepted.inc()
            self.len_chars.inc(len(verdict.hint))
            num_positive = sum(vote.score == 1 for vote in verdict.votes)
            self.minority.inc(2 * num_positive <= len(verdict.votes))
        if verdict.reward is not None:
            self.rewards[(verdict.reward > 0) - (verdict.reward < 0)].inc()
            self.without_hint.inc(verdict.hint is None)
