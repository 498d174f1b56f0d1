"""What rehearsal came to, as gauges of the process that does it. The whole run's figures stand in
RUN/rehearsal.jsonl.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from trainer.rehearsal.journal import VersionRow


class RehearsalMetrics:
    """Gauges of the newest version that was measured; unset before the first."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.version = self._gauge("rehearsal_version", "Newest version that was measured")
        self.hints = self._gauge("rehearsal_hints", "Hints practised, by status", "status")
        self.obedience = self._gauge(
            "rehearsal_obedience",
            "Share of open wishes done, over the last versions",
            "of",
        )
        self.keep = self._gauge(
            "rehearsal_keep_gap_nats", "Gap per token to the start model at states of other kinds"
        )
        self.gap = self._gauge("rehearsal_gap_nats", "Gap per token under the hint", "hint_id")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def show(self, row: VersionRow) -> None:
        """Set them to what this version came to."""
        self.version.set(row.version)
        self.hints.clear()
        self.gap.clear()
        for one in row.hints:
            self.hints.labels(status=one.status.value).inc()
            if one.gap is not None:
                self.gap.labels(hint_id=one.hint_id).set(one.gap.value)
        if row.pooled is not None:
            for name in ("value", "low", "high", "before", "floor"):
                self.obedience.labels(of=name).set(getattr(row.pooled, name))
        if row.keep is not None:
            self.keep.set(row.keep.value)
