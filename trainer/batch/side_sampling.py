"""What only the weights that sampled a turn, or its teacher, can say: their scores of its tokens,
and side samples.

The engine's log-probs of sampled tokens differ from those of the trainer at the same weights only
by arithmetic, and those of the policy before the step only by age (ALGORITHMS 5.2, 6.9).

Side samples are further tokens at every position of a response, scored by policy and teacher. They
are made once, when a turn is first leased, and stored with it (ALGORITHMS 5.2, 5.4):

    drawn by the weights that sampled the turn, for the reverse KL
    the likeliest tokens of these weights, where an engine teaches a finite cache
    drawn by the teacher, for the forward KL

A teacher in the trainer scores them here, or an engine that teaches: the same tokens, under the
hinted prompt. Where a trainer keeps no weights, the scoring stage makes them instead.

Shapes: R tokens of a turn's response, K side samples per position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from records.names import DropReason, SideSource
from records.types import Ids, Logprobs, ReadySample, SideSamples
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.merging import merge_turns
from rollout_bridge.scoring.scoring import fault_of
from rollout_bridge.together import all_or_none
from trainer.batch.collate import (
    TurnScores,
    micro_batches,
    score_batches,
    score_responses,
)
from trainer.batch.views import TeachingPlan
from trainer.model.token_states import LogprobModel

logger = logging.getLogger(__name__)


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
        merged = merge_turns(chosen)
        batches = micro_batches(chosen, merged, max_tokens, device, at_temperature=at_temperature)
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


class TokenScorer(Protocol):
    """An engine that scores given tokens."""

    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs:
        """Log-probs [R, K] at temperature 1 of `token_ids` [R, K] at the positions from `start`."""
        ...


NamedScorers: TypeAlias = Callable[[str], TokenScorer | None]
"""The engine that teaches under a name; None if no teacher has it."""


async def scored_by_engine(
    samples: Sequence[ReadySample], teachers: NamedScorers, concurrency: int
) -> list[ReadySample | DropReason]:
    """`samples` with scores of their side samples, each by the teacher that scored the turn,
    `concurrency` turns at a time; a reason in place of one that cannot be scored.

    Raises ServiceUnavailable if a teacher does not answer, or refuses for another reason than the
    sample.
    """
    slots = asyncio.Semaphore(concurrency)

    async def scored(sample: ReadySample) -> ReadySample | DropReason:
        side = sample.side_samples
        assert side is not None
        taught = sample.teachings[0]
        teacher = teachers(taught.teacher)
        if teacher is None:
            logger.warning(
                "turn %s is dropped: no teacher is called %r", sample.turn_id, taught.teacher
            )
            return DropReason.UNKNOWN_TEACHER
        prompt = taught.hinted_prompt_ids
        ids = np.concatenate([prompt, sample.response_ids])
        try:
            async with slots:
                found = await teacher.score_tokens(
                    ids, len(prompt), side.ids, routing_key=sample.session_id
                )
        except EngineError as error:
            reason, detail = fault_of(error)
            logger.warning(
                "turn %s is dropped as %s: its side samples: %s", sample.turn_id, reason, detail
            )
            return reason
        return replace(sample, side_samples=replace(side, teacher_logprobs=found))

    return await all_or_none([scored(sample) for sample in samples])
