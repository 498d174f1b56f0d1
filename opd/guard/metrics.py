"""What the guard counts, for `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollout_bridge.guard.checks import Checked


class GuardMetrics:
    """Figures of the version that was checked last; what was not measured has no sample."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.withdrawn = Counter(
            "guard_withdrawn", "Versions that the guard withdrew.", registry=self.registry
        )
        self.not_published = Counter(
            "guard_not_published",
            "Versions that failed before any agent was answered by them.",
            registry=self.registry,
        )
        self._values = Gauge(
            "guard_check",
            "Results of the version that was checked last on the canaries, by figure.",
            ["of"],
            registry=self.registry,
        )

    def count_failed(self, row: Checked) -> None:
        """Count a version that failed."""
        (self.not_published if row.staged else self.withdrawn).inc()

    def set(self, row: Checked) -> None:
        """Show this check."""
        self._values.clear()
        recorded = row.recorded
        values = {
            "version": row.version,
            "passed_share": row.passed / row.asked if row.asked else None,
            "kl_nats": row.kl,
            "kl_last_nats": row.kl_last,
            "gap_nats": None if row.gap is None else row.gap.value,
            "gap_start_nats": None if row.gap_start is None else row.gap_start.value,
            "tokens": row.tokens,
            "surprise_nats": row.surprise,
            "repeated_share": row.repeated,
            "recorded_kl_nats": None if recorded is None else recorded.kl,
            "recorded_tokens": None if recorded is None else recorded.tokens,
            "breaches": len(row.breaches),
            "seconds": row.took_s,
        }
        for name, value in values.items():
            if value is not None:
                self._values.labels(name).set(value)
