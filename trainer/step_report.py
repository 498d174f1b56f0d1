"""What one update attempt says about itself, to the store, the metrics and the caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from records.types import DropReason, Logprobs, ReadySample, SampleResult
from trainer.manifest import Manifest
from trainer.update import UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One update attempt: the version it made, or why it made none; metrics as logged."""

    version: int | None
    skipped: DropReason | None
    metrics: dict[str, Any]


def trained_results(
    samples: Sequence[ReadySample], staleness: Sequence[int], report: UpdateReport
) -> list[SampleResult]:
    """What training did with each sample that has a token left after the guards."""
    return [
        _result(sample, age, advantages)
        for sample, age, advantages in zip(samples, staleness, report.advantages, strict=True)
        if np.isfinite(advantages).any()
    ]


def step_metrics(
    report: UpdateReport,
    *,
    manifest: Manifest,
    staleness: Sequence[int],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """One record of the metrics log; `manifest` is the newest step, `staleness` is in versions."""
    return {
        "time": time.time(),
        "step": manifest.step,
        "version": manifest.version,
        "skipped": report.skipped.value if report.skipped else None,
        "staleness_min": min(staleness),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        **report.metrics,
        **seconds,
    }


def _result(sample: ReadySample, staleness: int, advantages: Logprobs) -> SampleResult:
    """Mean and maximum over the tokens that trained."""
    finite = advantages[np.isfinite(advantages)]
    return SampleResult(
        turn_id=sample.turn_id,
        staleness=staleness,
        advantage_mean=float(finite.mean()),
        advantage_abs_max=float(np.abs(finite).max()),
        advantages=advantages,
    )
