"""Whether a batch with lessons teaches more than noise."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest

from records.lessons.names import LessonKind
from records.types import ReadySample
from trainer.batch.statistics import BatchTotals
from trainer.step.lessons import teaches

HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP


@pytest.mark.parametrize(
    ("lessons", "gaps", "taught"),
    [
        ([None, KEEP], [0.5, 0.0], True),
        ([HINT, KEEP], [0.05, 9.0], False),
        ([HINT, COUNTER], [math.nan, 9.0], False),
        ([KEEP, KEEP], [0.05, 0.0], True),
        ([KEEP, KEEP], [0.0, 0.0], False),
        ([KEEP], [math.nan], False),
    ],
)
def test_hinted_samples_are_held_against_the_noise_and_keep_lessons_against_nothing(
    lessons: list[LessonKind | None], gaps: list[float], taught: bool
) -> None:
    samples = [SimpleNamespace(lesson=one) for one in lessons]
    totals = SimpleNamespace(
        mean_gap_of=lambda places: sum(gaps[place] for place in places) / len(places)
    )
    assert teaches(cast(list[ReadySample], samples), cast(BatchTotals, totals), 0.1) is taught
