"""Side samples: further tokens at every position of a response, drawn by the policy as it is now.

They are drawn once, scored by the teacher and stored with the turn: a trainer that dies and comes
back, with other weights perhaps, corrects for the weights that drew them (ALGORITHMS 5.2, 5.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from records.types import Logprobs, ReadySample, SideSamples
from rollout_bridge.merging import merge_turns
from trainer.batch.collate import build_micro_batch, plan_micro_batches
from trainer.batch.teach import TeachingPlan
from trainer.batch.turn_scores import score_batches, score_responses
from trainer.model.policy import Policy


def lacks_side_samples(sample: ReadySample, plan: TeachingPlan) -> bool:
    """Whether the plan needs side samples that this turn has not, or has in another number."""
    if plan.options.support != "samples" or not sample.teachings:
        return False
    side = sample.side_samples
    return side is None or side.ids.shape[-1] != plan.support_size


def with_side_samples(
    samples: Sequence[ReadySample], policy: Policy, plan: TeachingPlan, version: int
) -> list[ReadySample]:
    """`samples` with side samples drawn under the policy's weights, which are those of `version`.

    Raises ValueError for a plan without a teacher in the trainer.
    """
    if plan.model is None:
        raise ValueError("side samples need a teacher in the trainer: set trainer.teacher.kind")
    if not samples:
        return []
    groups = plan_micro_batches(merge_turns(samples), plan.max_tokens)
    batches = [build_micro_batch(group, plan.device) for group in groups]
    drawn = score_batches(policy, batches, draw=plan.support_size)
    ids = [score.drawn_ids for score in drawn if score.drawn_ids is not None]
    teacher = score_responses(
        plan.model,
        [sample.teachings[0].hinted_prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        max_tokens=plan.max_tokens,
        device=plan.device,
        support_ids=ids,
    )
    result = []
    for sample, own, score in zip(samples, drawn, teacher, strict=True):
        assert own.drawn_ids is not None
        assert own.drawn is not None
        assert score.support is not None
        side = SideSamples(
            ids=own.drawn_ids.cpu().numpy().astype(np.int32),
            rollout_logprobs=own.drawn.cpu().numpy().astype(np.float32),
            # Infinite ones are not stored; NaN drops the turn before it trains.
            teacher_logprobs=_finite_or_nan(score.support),
            policy_version=version,
        )
        result.append(replace(sample, side_samples=side))
    return result


def _finite_or_nan(values: Tensor) -> Logprobs:
    found = torch.where(torch.isfinite(values), values, torch.nan)
    return found.cpu().numpy().astype(np.float32)
