"""What the scoring worker's counters come to."""

from __future__ import annotations

from records.names import DropReason
from rollout_bridge.scoring.scoring_metrics import ScoringMetrics, drop_metric


def scoring_figures(metrics: ScoringMetrics) -> dict[str, float]:
    """The figures under the specification's names; latency is a mean in seconds."""
    figures = {"teacher/scored": _value(metrics, "teacher_scored_total")}
    num_calls = _value(metrics, "teacher_latency_seconds_count")
    if num_calls:
        figures["teacher/latency"] = _value(metrics, "teacher_latency_seconds_sum") / num_calls
    for reason in DropReason:
        number = metrics.registry.get_sample_value(
            "teacher_dropped_total", {"reason": reason.value}
        )
        if number is not None:
            figures[drop_metric(reason)] = number
    return figures


def _value(metrics: ScoringMetrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name)
    assert value is not None, name
    return value
