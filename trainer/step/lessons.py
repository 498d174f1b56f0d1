"""Lessons in a batch: which samples are hinted, what is reported by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from records.lessons.names import LessonKind
from records.types import ReadySample
from rollout_bridge.rehearsal.kinds import counts_by_kind, kind_of
from trainer.batch.statistics import BatchTotals


def hinted_places(samples: Sequence[ReadySample]) -> list[int]:
    """Places of the samples whose teacher reads a hint. Counter- and keep-lessons hold the policy
    to the start: their small gaps do not mean that a batch teaches nothing.
    """
    return [place for place, one in enumerate(samples) if one.lesson in (None, LessonKind.HINT)]


def teaches(samples: Sequence[ReadySample], totals: BatchTotals, floor: float) -> bool:
    """Whether the mean |teacher - student| of a batch's hinted samples is more than `floor`, the
    noise in nats. A batch without any undoes what ended hints taught or wins open wishes back: a
    measurement decides when that is enough, so its mean need not be above the noise, only above 0.
    """
    hinted = hinted_places(samples)
    if hinted:
        return totals.mean_gap_of(hinted) > floor
    return totals.mean_gap_of(range(len(samples))) > 0.0


def lesson_metrics(samples: Sequence[ReadySample], totals: BatchTotals) -> dict[str, float]:
    """For a batch with lessons: how many of each kind and of each hint, and by kind the mean
    |teacher - student| of the tokens that have a teacher, in nats. Empty for a batch without
    lessons.
    """
    if all(sample.lesson is None for sample in samples):
        return {}
    places: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(kind_of(sample), []).append(place)
    counts = counts_by_kind(samples)
    gaps = {f"lessons/gap_{kind}": totals.mean_gap_of(found) for kind, found in places.items()}
    return counts | {name: gap for name, gap in gaps.items() if not math.isnan(gap)}
