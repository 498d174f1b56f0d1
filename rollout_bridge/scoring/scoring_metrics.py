"""Metrics of teacher scoring, under the names of ALGORITHMS 1.8.

Prometheus names cannot contain a slash: `teacher/latency` is exposed as `teacher_latency_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from records.names import DropReason
from records.types import UNSCORED, Score


def drop_metric(reason: DropReason) -> str:
    """The specification's name for the number of turns dropped for `reason`."""
    if reason is DropReason.TEACHER_MISALIGNED:
        return "hint/dropped_misaligned"
    return f"hint/dropped_{reason.value}"


class ScoringMetrics:
    """Counters of one scoring worker; latency is that of the teacher's call alone."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.latency = Histogram(
            "teacher_latency_seconds", "Duration of a teacher call", registry=self.registry
        )
        self.scored = Counter("teacher_scored", "Turns scored", registry=self.registry)
        self.tokens = Counter("teacher_tokens", "Response tokens scored", registry=self.registry)
        self.prompt_tokens = Counter(
            "teacher_prompt_tokens", "Tokens of hinted prompts scored under", registry=self.registry
        )
        self.side_requests = Counter(
            "policy_side_requests",
            "Requests to the policy for side samples",
            registry=self.registry,
        )
        self.dropped = Counter(
            "teacher_dropped", "Turns dropped by scoring", ["reason"], registry=self.registry
        )
        self.hintless = Counter(
            "teacher_hintless",
            "Turns that continue with their reward alone, by the reason for dropping the hint",
            ["reason"],
            registry=self.registry,
        )
        self.unavailable = Gauge(
            "teacher_failures_in_a_row",
            "Failures of the teacher since its last answer",
            registry=self.registry,
        )

    def count_scored(self, scores: Sequence[Score]) -> None:
        """Add the committed scores of one turn: tokens and latency are those of every call."""
        self.scored.inc()
        for score in scores:
            if score.teacher_version != UNSCORED:
                self.tokens.inc(len(score.teacher_logprobs))
                self.prompt_tokens.inc(len(score.hinted_prompt_ids))
                self.latency.observe(score.latency_s)

    def count_dropped(self, reason: DropReason, number: int = 1) -> None:
        """Add dropped turns."""
        if number:
            self.dropped.labels(reason=reason.value).inc(number)
