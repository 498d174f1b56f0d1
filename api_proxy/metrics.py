"""Counters of the endpoint, in Prometheus' format; one registry for each application.

`opd_bridge_total` counts how prompts were built, `opd_links_total` how requests were linked. The
share of requests with a history that link to nothing shows whether feedback is being lost: above
5%, it is logged.
"""

from __future__ import annotations

import logging
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from api_proxy.linking.lineage import Lineage
from api_proxy.server.refusals import Refusals
from records.names import DropReason

logger = logging.getLogger(__name__)

_WINDOW = 200
_LEAST_FOR_WARNING = 40
_UNMATCHED_WARNING = 0.05
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class ProxyMetrics:
    """All counters of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "opd_requests", "Requests answered, by HTTP status.", "status"
        )
        self.turns = self._counter("opd_turns", "Turns recorded, by drop reason.", "drop_reason")
        self._add_store_metrics()
        self.links = self._counter("opd_links", "Requests, by how they were linked.", "how")
        self.feedback = self._counter(
            "opd_feedback", "Feedback, by what became of it, or why it was refused.", "outcome"
        )
        self.reviews = self._counter(
            "opd_reviews", "Hints that people decided on, by what they decided.", "decision"
        )
        self.next_states = self._counter("opd_next_states", "Turns that got their next state.")
        self.side_turns = self._counter(
            "opd_side_turns", "Side requests, by the rule that matched.", "rule"
        )
        self.bridge = self._counter("opd_bridge", "Prompts, by how their ids were made.", "how")
        self.tokens = self._counter("opd_tokens", "Tokens, by kind.", "kind")
        self.continuations = self._counter("opd_continuations", "Interrupted replies continued.")
        self.mismatches = self._counter(
            "opd_stream_mismatches", "Streams whose final parse disagreed with what was sent."
        )
        self.longest_wait_s = Gauge(
            "opd_longest_wait_seconds",
            "Longest time since a request in flight heard from the engine; it grows while weights "
            "load or the engine stays paused. An unstreamed reply is heard only at its end.",
            ["reply"],
            registry=self.registry,
        )
        self.waiting = Gauge(
            "opd_waiting", "Requests that wait for a place.", registry=self.registry
        )
        self.held = Gauge(
            "opd_held",
            "Requests that wait because the trainer's schedule holds generation.",
            registry=self.registry,
        )
        self.held_requests = self._counter(
            "opd_held_requests", "Requests that waited because generation was held."
        )
        self.held_s = self._histogram(
            "opd_held_seconds", "How long requests waited because generation was held."
        )
        self.holds = self._counter(
            "opd_holds",
            "Holds that requests waited for, by their end: ended (by the trainer), max_hold "
            "(trainer.max_hold_s was over), trainer_gone.",
            "end",
        )
        self.limited = self._counter(
            "opd_limited", "Requests refused with 429, by which limit.", "limit"
        )
        self.foreign = self._counter(
            "opd_foreign_requests",
            "Requests refused because no key exists and they may come from a web page, by check.",
            "check",
        )
        self.oversized = self._counter(
            "opd_oversized",
            "Requests refused and connections closed because they exceed a limit, by limit.",
            "limit",
        )
        self.refusals = Refusals(self.oversized)
        self.in_flight = Gauge("opd_in_flight", "Requests being answered.", registry=self.registry)
        self.unmatched_share = Gauge(
            "opd_unmatched_share",
            "Share of the latest requests with a history that link to no turn.",
            registry=self.registry,
        )
        self.first_token_s = self._histogram(
            "opd_first_token_seconds", "Time until the first token."
        )
        self.request_s = self._histogram("opd_request_seconds", "Time until the end of the reply.")
        self._unmatched: deque[bool] = deque(maxlen=_WINDOW)
        self._since_warning = _WINDOW

    def _add_store_metrics(self) -> None:
        """Add the metrics of writes to the store, and of what is in it."""
        self.failed_turns = self._counter(
            "opd_store_failed_turns", "Turns that were lost: neither stored nor spilled."
        )
        self.unrecorded = self._counter(
            "opd_unrecorded_turns", "Turns answered but not recorded: their key's consent is none."
        )
        self.spilled = self._counter(
            "opd_store_spilled",
            "Records that went to a spill file because the store could not take them.",
            "what",
        )
        self.taken_in = self._counter(
            "opd_store_taken_in", "Records of spill files that were stored later."
        )
        self.spill_torn = self._counter(
            "opd_store_spill_torn", "Spill files that ended in a record cut off by a crash."
        )
        self.spill_refused = self._counter(
            "opd_store_spill_refused",
            "Records that cannot be read or that the store will never take; their files are kept.",
        )
        self.texts_refused = self._counter(
            "opd_texts_refused",
            "Turns whose text cannot be searched: the database refuses it, or it is unreadable.",
            "reason",
        )
        self.spill_waiting = Gauge(
            "opd_store_spill_waiting",
            "Spilled records that wait for the store, and files of dead processes. Alarm if not 0.",
            registry=self.registry,
        )
        self.failed_lookups = self._counter(
            "opd_store_failed_lookups",
            "Requests answered unlinked because the store did not answer.",
        )
        self.failed_next_states = self._counter(
            "opd_store_failed_next_states", "Next states lost: neither stored nor spilled."
        )
        self.findings = Counter(
            "opd_findings",
            "Secrets and personal data in distinct messages, by kind and what became of them.",
            ["kind", "mode"],
            registry=self.registry,
        )
        self.too_long = self._counter(
            "opd_redaction_refused",
            "Requests refused because they have more text than store.redaction.max_chars.",
        )
        self.expired_sessions = self._counter(
            "opd_retention_sessions", "Sessions deleted because of their age."
        )
        self.expired_turns = self._counter(
            "opd_retention_turns", "Turns deleted because of their session's age."
        )
        self.expired_answers = self._counter(
            "opd_retention_answers",
            "Rewarded answers that pass rates no longer count, because of their session's age.",
        )

    def _counter(self, name: str, text: str, label: str | None = None) -> Counter:
        return Counter(name, text, [label] if label else [], registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def linked(self, lineage: Lineage) -> None:
        """Count how a request was linked."""
        link = lineage.link
        if lineage.is_deferred:
            self.links.labels("deferred").inc()
            return
        if not lineage.has_history:
            self.links.labels("first").inc()
            return
        is_unmatched = link.how == "none"
        how = "ambiguous" if link.ambiguous else "retry" if link.retry else link.how
        self.links.labels("unmatched" if is_unmatched else how).inc()
        self._unmatched.append(is_unmatched)
        share = sum(self._unmatched) / len(self._unmatched)
        self.unmatched_share.set(share)
        self._since_warning += 1
        is_due = self._since_warning >= _WINDOW and len(self._unmatched) >= _LEAST_FOR_WARNING
        if share > _UNMATCHED_WARNING and is_due:
            self._since_warning = 0
            logger.warning(
                "%.0f%% of the latest %d requests with a history link to no earlier turn: "
                "their feedback is lost",
                100 * share,
                len(self._unmatched),
            )

    def found(self, kind: str, mode: str, number: int) -> None:
        """Count findings."""
        self.findings.labels(kind, mode).inc(number)

    def recorded(self, reason: DropReason | None) -> None:
        """Count a recorded turn."""
        self.turns.labels(reason.value if reason else "none").inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
