"""The trainer's scores of sampled tokens at the weights that sampled them (ALGORITHMS 5.2, 6.9).

The engine's log-probs differ from these only by arithmetic, and those of the policy before the step
only by age.

Shapes: R tokens of a turn's response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """Whether the weights that sampled each token of a turn are known and kept."""
    end = 0
    for span in sample.version_spans:
        if span.start != end or not older.has(span.version):
            return False
        end = span.end
    return end == len(sample.response_ids)


@torch.no_grad()
def by_sampling_weights(
    samples: Sequence[ReadySample],
    version_gaps: Sequence[int],
    policy: LogprobModel,
    older: Older | None,
    read: Callable[[TurnScores], tuple[Tensor, ...]],
    *,
    max_tokens: int,
    device: torch.device | str,
    draw: int = 0,
    top_k: int = 0,
    at_temperature: bool = True,
) -> list[tuple[Tensor, ...]]:
    """What `read` takes from each turn's scores, [R, ...] each. Each token is scored by the weights
    that sampled it: those of `policy` if the turn's gap is 0, else those of a version that `older`
    has. The turns are ones that `is_known` accepts.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    fresh = [index for index, gap in enumerate(version_gaps) if gap == 0]
    stale = [index for index, gap in enumerate(version_gaps) if gap > 0]
    spans = {index: samples[index].version_spans for index in stale}
    versions = sorted({span.version for parts in spans.values() for span in parts})
    jobs: list[tuple[int | None, list[int]]] = [(None, fresh)] if fresh else []
    jobs += [
        (version, [index for index in stale if any(s.version == version for s in spans[index])])
        for version in versions
    ]
    for version, among in jobs:
        chosen = [samples[index] for index in among]
        temperatures = None
        if at_temperature:
            temperatures = [one.temperature if comparable(one) else 1.0 for one in chosen]
        batches = [
            build_micro_batch(group, device, temperatures)
            for group in plan_micro_batches(merge_turns(chosen), max_tokens)
        ]
        with _weights(version, policy, older) as model:
            scores = score_batches(model, batches, draw=draw, top_k=top_k)
        for index, score in zip(among, scores, strict=True):
            values = read(score)
            # Each of several versions scores its own tokens, and together they cover the response.
            kept = found.setdefault(index, tuple(one.clone() for one in values))
            for span in spans.get(index, ()):
                if span.version == version:
                    part = slice(span.start, span.end)
                    for into, value in zip(kept, values, strict=True):
                        into[part] = value[part]
    return [found[index] for index in range(len(samples))]


def _weights(
    version: int | None, policy: LogprobModel, older: Older | None
) -> AbstractContextManager[LogprobModel]:
    if version is None:
        return nullcontext(policy)
    assert older is not None, "the updater of a run has it"
    return older.at(version)
