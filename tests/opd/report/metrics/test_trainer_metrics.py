"""What the trainer counts is in its file while it works, and when it has ended."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from opd.report.metrics.metrics_file import writing_metrics
from opd.report.metrics.trainer_metrics import TrainerMetrics
from records.names import DropReason
from trainer.step.report import StepReport

FIGURES = {
    "seconds/step": 3.0,
    "seconds/publish": 0.2,
    "turns": 24.0,
    "tokens": 400.0,
    "guard/engines_behind": 1,
}


def written(folder: Path) -> dict[str, float]:
    text = (folder / "metrics" / "trainer.prom").read_text(encoding="utf-8")
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_steps_are_counted_and_written(tmp_path: Path) -> None:
    metrics = TrainerMetrics()
    with writing_metrics(tmp_path, "trainer", [metrics.registry]):
        assert written(tmp_path)["trainer_steps_total"] == 0
        metrics.count(StepReport(version=1, skipped=None, metrics=FIGURES))
        skipped = StepReport(version=None, skipped=DropReason.BELOW_NOISE, metrics={})
        metrics.count(skipped)
    found = written(tmp_path)
    assert found["trainer_steps_total"] == 1
    assert found["trainer_tokens_total"] == 400
    assert found["trainer_step_seconds_sum"] == 3.0
    assert found["trainer_publication_seconds_count"] == 1
    assert found["trainer_skipped_batches_totalbelow_noise"] == 1
    assert found["trainer_engines_behind"] == 1
