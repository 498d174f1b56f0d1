"""Durations and results of the trainer's steps, in Prometheus' form, for the process that trains.

Counted from the figures that each attempt reports to metrics.jsonl; nothing is measured here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from trainer.step.report import StepReport

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class TrainerMetrics:
    """Counters of one trainer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._step_s = Histogram(
            "trainer_step_seconds",
            "Duration of a step, from the batch to the published version.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._publish_s = Histogram(
            "trainer_publication_seconds",
            "Time until the engines served a new version.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._steps = Counter("trainer_steps", "Steps trained.", registry=self.registry)
        self._skipped = Counter(
            "trainer_skipped_batches",
            "Batches that taught nothing, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._samples = Counter("trainer_samples", "Samples trained.", registry=self.registry)
        self._tokens = Counter("trainer_tokens", "Tokens trained.", registry=self.registry)
        self._behind = Gauge(
            "trainer_engines_behind",
            "Engines that do not serve what they are to serve. Alarm if it stays above 0.",
            registry=self.registry,
        )

    def count(self, step: StepReport) -> None:
        """Add one attempt, by the figures of its line in metrics.jsonl."""
        figures = step.metrics
        if step.skipped is not None:
            self._skipped.labels(step.skipped.value).inc()
            return
        self._steps.inc()
        self._step_s.observe(figures["seconds/step"])
        self._publish_s.observe(figures["seconds/publish"])
        self._samples.inc(figures["turns"])
        self._tokens.inc(figures["tokens"])
        self._behind.set(figures["guard/engines_behind"])
