"""Turns that are not merged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.types import ReadySample
from rollout_bridge.merging import PackedSequence, TurnSpan


def separate_turns(samples: Sequence[ReadySample]) -> list[PackedSequence]:
    """One sequence per sample, the reference that `merge_turns` must agree with."""
    return [
        PackedSequence(
            ids=np.concatenate([one.prompt_ids, one.response_ids]),
            spans=(
                TurnSpan(
                    turn=index,
                    start=len(one.prompt_ids),
                    end=len(one.prompt_ids) + len(one.response_ids),
                ),
            ),
        )
        for index, one in enumerate(samples)
    ]
