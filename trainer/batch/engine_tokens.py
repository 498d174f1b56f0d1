"""Side samples scored by an engine that teaches: the same tokens, under the hinted prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from records.names import DropReason
from records.types import Ids, Logprobs, ReadySample
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.scoring.scoring import fault_of
from rollout_bridge.together import all_or_none

logger = logging.getLogger(__name__)


class TokenScorer(Protocol):
    """An engine that scores given tokens."""

    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs:
        """Log-probs [R, K] at temperature 1 of `token_ids` [R, K] at the positions from `start`."""
        ...


async def scored_by_engine(
    samples: Sequence[ReadySample], teacher: TokenScorer, concurrency: int
) -> list[ReadySample | DropReason]:
    """`samples` with the teacher's scores of their side samples, `concurrency` turns at a time; a
    reason in place of one that it cannot score.

    Raises ServiceUnavailable if it does not answer, or refuses for another reason than the sample.
    """
    slots = asyncio.Semaphore(concurrency)

    async def scored(sample: ReadySample) -> ReadySample | DropReason:
        side = sample.side_samples
        assert side is not None
        prompt = sample.teachings[0].hinted_prompt_ids
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
