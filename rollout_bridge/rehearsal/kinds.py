"""Kinds of samples: turns of agents, and lessons of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from records.lessons.names import LessonKind
from records.types import ReadySample

LIVE = "live"
"""The kind of a turn, next to those of lessons."""


def kind_of(sample: ReadySample) -> str:
    """`live`, or the kind of the lesson."""
    return LIVE if sample.lesson is None else sample.lesson.value


def counts_by_kind(samples: Sequence[ReadySample]) -> dict[str, float]:
    """How many lessons of each kind and of each hint a batch has; empty for one without lessons."""
    if all(sample.lesson is None for sample in samples):
        return {}
    kinds = Counter(map(kind_of, samples))
    of_hints = Counter(sample.hint_id for sample in samples if sample.hint_id is not None)
    return {f"lessons/{kind.value}": float(kinds[kind.value]) for kind in LessonKind} | {
        f"lessons/of_{hint_id}": float(number) for hint_id, number in of_hints.items()
    }
