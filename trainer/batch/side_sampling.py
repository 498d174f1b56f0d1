"""Side samples: further tokens at every position of a response, scored by policy and teacher.

They are made once, when a turn is first leased, and stored with it (ALGORITHMS 5.2, 5.4):

    drawn by the weights that sampled the turn, for the reverse KL
    the likeliest tokens of these weights, where an engine teaches a finite cache
    drawn by the teacher, for the forward KL

A teacher in the trainer scores them here; `engine_tokens` asks an engine.

Shapes: R tokens of a turn's response, K side samples per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from records.names import SideSource
from records.types import Logprobs, ReadySample, SideSamples
from trainer.batch.sampling_scores import Older, by_sampling_weights
from trainer.batch.teach import TeachingPlan
from trainer.batch.turn_scores import TurnScores, score_responses
from trainer.model.token_states import LogprobModel


def lacks_side_samples(sample: ReadySample, plan: TeachingPlan) -> bool:
    """Whether the plan needs side samples that this turn lacks, or has in another number or from
    another source.
    """
    if plan.side_source is None or not sample.teachings:
        return False
    side = sample.side_samples
    return (
        side is None or side.ids.shape[-1] != plan.support_size or side.source != plan.side_source
    )


def with_side_samples(
    samples: Sequence[ReadySample],
    policy: LogprobModel,
    plan: TeachingPlan,
    version_gaps: Sequence[int] | None = None,
    older: Older | None = None,
) -> list[ReadySample]:
    """`samples` with side samples. The teacher's scores are NaN where no model here teaches.

    `version_gaps` (steps since each was sampled) default to 0; if one is above, `older` has the
    weights that sampled. Raises ValueError for a plan without side samples.
    """
    if plan.side_source is None:
        raise ValueError(f"objective {plan.options.name!r} has no side samples")
    if not samples:
        return []
    if plan.side_source is SideSource.TEACHER:
        scores = _teacher_scores(samples, plan, draw=plan.support_size)
        own = [_tokens(score, draws=True) for score in scores]
        teacher = [logprobs for _, logprobs in own]
    else:
        own = _by_sampling_weights(samples, policy, plan, version_gaps, older)
        teacher = _scored_here(samples, [ids for ids, _ in own], plan)
    return [
        replace(
            sample,
            side_samples=SideSamples(
                ids=ids.cpu().numpy().astype(np.int32),
                rollout_logprobs=logprobs.float().cpu().numpy(),
                # Infinite ones are not stored; NaN drops the turn before it trains.
                teacher_logprobs=_finite_or_nan(taught),
                policy_version=sample.version_spans[-1].version,
                source=plan.side_source,
            ),
        )
        for sample, (ids, logprobs), taught in zip(samples, own, teacher, strict=True)
    ]


def _by_sampling_weights(
    samples: Sequence[ReadySample],
    policy: LogprobModel,
    plan: TeachingPlan,
    version_gaps: Sequence[int] | None,
    older: Older | None,
) -> list[tuple[Tensor, ...]]:
    size = plan.support_size
    draws = plan.side_source is SideSource.POLICY
    return by_sampling_weights(
        samples,
        [0] * len(samples) if version_gaps is None else version_gaps,
        policy,
        older,
        lambda score: _tokens(score, draws),
        max_tokens=plan.max_tokens,
        device=plan.device,
        draw=size if draws else 0,
        top_k=0 if draws else size,
        at_temperature=False,
    )


def _tokens(score: TurnScores, draws: bool) -> tuple[Tensor, ...]:
    """(ids, log-probs) [R, K] of what was drawn, or of the likeliest."""
    ids = score.drawn_ids if draws else score.topk_ids
    logprobs = score.drawn if draws else score.topk
    assert ids is not None
    assert logprobs is not None
    return ids, logprobs


def _scored_here(
    samples: Sequence[ReadySample], ids: Sequence[Tensor], plan: TeachingPlan
) -> list[Tensor]:
    """Log-probs [R, K] of `ids` by the teacher in the trainer; NaN if there is none."""
    if plan.model is None:
        return [torch.full(one.shape, torch.nan) for one in ids]
    scores = _teacher_scores(samples, plan, support_ids=ids)
    return [score.support for score in scores if score.support is not None]


def _teacher_scores(
    samples: Sequence[ReadySample],
    plan: TeachingPlan,
    *,
    support_ids: Sequence[Tensor] | None = None,
    draw: int = 0,
) -> list[TurnScores]:
    assert plan.model is not None, "the objective needs a teacher in the trainer"
    return score_responses(
        plan.model,
        [sample.teachings[0].hinted_prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        max_tokens=plan.max_tokens,
        device=plan.device,
        support_ids=support_ids,
        draw=draw,
    )


def _finite_or_nan(values: Tensor) -> Logprobs:
    found = torch.where(torch.isfinite(values), values, torch.nan)
    return found.float().cpu().numpy()
