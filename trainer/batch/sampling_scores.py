"""What the trainer says of sampled tokens at the weights that sampled them (ALGORITHMS 6.9).

The engine's log-probs of them differ from these by arithmetic alone, and those of the policy before
the step by age alone.

Shapes: R tokens of a turn's response.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from records.types import ReadySample
from rollout_bridge.merging import merge_turns
from trainer.batch.collate import build_micro_batch, comparable, plan_micro_batches
from trainer.batch.turn_scores import TurnScores, score_batches
from trainer.model.token_states import LogprobModel


class Older(Protocol):
    """The policy at versions before the newest."""

    def has(self, version: int) -> bool:
        """Whether the weights of `version` are kept."""
        ...

    def at(self, version: int) -> AbstractContextManager[LogprobModel]:
        """The policy at `version`, for scoring."""
        ...


def is_known(sample: ReadySample, older: Older) -> bool:
    """Whether all weights that sampled a turn are kept."""
    return all(older.has(span.version) for span in sample.version_spans)


@torch.no_grad()
def sampling_logprobs(
    samples: Sequence[ReadySample],
    version_gaps: Sequence[int],
    before: Sequence[TurnScores],
    older: Older,
    *,
    max_tokens: int,
    device: torch.device | str,
) -> list[Tensor]:
    """Log-probs [R] of each turn at its sampling temperature and weights; those of the policy
    `before` the step where these are the same (`version_gaps` 0).
    """
    found = [scores.logprobs_sampled.clone() for scores in before]
    stale = [index for index, gap in enumerate(version_gaps) if gap > 0]
    versions = {span.version for index in stale for span in samples[index].version_spans}
    for version in sorted(versions):
        among = [
            index
            for index in stale
            if any(span.version == version for span in samples[index].version_spans)
        ]
        chosen = [samples[index] for index in among]
        temperatures = [one.temperature if comparable(one) else 1.0 for one in chosen]
        batches = [
            build_micro_batch(group, device, temperatures)
            for group in plan_micro_batches(merge_turns(chosen), max_tokens)
        ]
        with older.at(version) as model:
            scores = score_batches(model, batches)
        for index, one in zip(among, scores, strict=True):
            for span in samples[index].version_spans:
                if span.version == version:
                    part = slice(span.start, span.end)
                    found[index][part] = one.logprobs_sampled[part]
    return found
