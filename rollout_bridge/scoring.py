"""The teacher stage: the log-probabilities of exactly the sampled ids, under the hinted prompt.

Takes turns that the judge gave a hint, builds the hinted prompt as ids (hinting.py), and asks a
frozen teacher for its log-probs, at temperature 1, of hinted prompt ids ++ response ids:
concatenated ids, never text (ALGORITHMS 1.6, 1.7). What does not fit exactly is dropped with a
reason. Knows no judge and no objective.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from records.types import DropReason, Ids, Logprobs, Score, TurnRecord, TurnState
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.errors import (
    EngineLogprobError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from rollout_bridge.engine.types import ModelInfo
from rollout_bridge.hinting import HintingError, hinted_prompt_ids
from rollout_bridge.rendering import Rendering
from rollout_bridge.scoring_metrics import ScoringMetrics
from rollout_bridge.worker import ClaimLoop, ClaimStore, ServiceUnavailable, StageStopped

logger = logging.getLogger(__name__)

RewriteHint: TypeAlias = Callable[[TurnRecord, str], str | None]

_TOO_LONG = re.compile(r"context|too long|longer than|exceed", re.I)


class TeacherChanged(StageStopped):
    """The teacher is not (or no longer) the frozen one: its scores would mix two teachers."""


class Teacher(Protocol):
    """What scoring needs of an engine client."""

    async def score(self, input_ids: Ids, start: int) -> Logprobs: ...
    async def model_info(self) -> ModelInfo: ...


class ScoringStore(ClaimStore, Protocol):
    """What scoring needs of the store."""

    async def commit_score(self, owner: str, score: Score) -> bool: ...


class ScoringWorker:
    """Scores turns in state `scoring` until stopped.

    `owner` names the claims: unique for each worker that runs at a time. `rewrite_hint` is for
    controls: it returns the hint to score with instead, or None to score under the original prompt
    (stored as the hint "").
    """

    def __init__(
        self,
        store: ScoringStore,
        teacher: Teacher,
        rendering: Rendering,
        config: ScoringConfig,
        owner: str,
        *,
        rewrite_hint: RewriteHint | None = None,
        metrics: ScoringMetrics | None = None,
    ) -> None:
        self._store, self._teacher, self._rendering = store, teacher, rendering
        self._config, self._owner, self._rewrite_hint = config, owner, rewrite_hint
        self._version = config.expected_version
        self._max_tokens = config.context_length
        self.metrics = metrics if metrics is not None else ScoringMetrics()
        self.loop = ClaimLoop(store, self, owner=owner, config=config.loop)
        self.metrics.unavailable.set_function(lambda: self.loop.failures_in_a_row)

    @property
    def state(self) -> TurnState:
        """The state from which turns are claimed."""
        return TurnState.SCORING

    async def run(self, stop: asyncio.Event) -> None:
        """Score until `stop` is set. Raises TeacherChanged; see also `ClaimLoop.run`."""
        await self.loop.run(stop)

    async def process(self, turn: TurnRecord) -> None:
        """Score one turn and commit, or drop it. Raises ServiceUnavailable, TeacherChanged."""
        try:
            score = await self._score(turn)
        except HintingError as error:
            await self._drop(turn, error.reason, error.detail)
        except EngineUnavailable as error:
            raise ServiceUnavailable(str(error)) from error
        except EngineRejected as error:
            if error.status not in (400, 413, 422) or not _TOO_LONG.search(error.message):
                raise ServiceUnavailable(f"the teacher refuses: {error}") from error
            await self._drop(turn, DropReason.HINTED_PROMPT_TOO_LONG, str(error))
        except EngineLogprobError as error:
            await self._drop(turn, DropReason.TEACHER_LOGPROBS_INVALID, str(error))
        except EngineProtocolError as error:
            await self._drop(turn, DropReason.TEACHER_MISALIGNED, str(error))
        else:
            await self._commit(turn, score)

    async def give_up(self, turn: TurnRecord, error: ServiceUnavailable) -> None:
        """Drop a turn that the teacher never scored."""
        await self._drop(turn, DropReason.TEACHER_UNAVAILABLE, str(error))

    async def _score(self, turn: TurnRecord) -> Score:
        if self._max_tokens is None:
            info = await self._teacher.model_info()
            self._check_frozen(info)
            self._max_tokens = info.context_length or sys.maxsize
        # Rendering a long conversation takes long enough to hold up the other turns' calls.
        hint, hinted_ids = await asyncio.to_thread(
            self._hinted, turn, self._max_tokens - len(turn.response_ids)
        )
        started = time.monotonic()
        try:
            teacher_logprobs = await self._teacher.score(
                np.concatenate([hinted_ids, turn.response_ids]), len(hinted_ids)
            )
        except ValueError as error:
            # A policy can sample a row of its head that the tokenizer has no id for.
            raise EngineProtocolError(f"ids that cannot be scored: {error}") from error
        latency_s = time.monotonic() - started
        # Asked AFTER the scores: labels are never used twice, so an unchanged one means that no
        # update came before or during the call.
        version = self._check_frozen(await self._teacher.model_info())
        return Score(
            turn_id=turn.turn_id,
            hint=hint,
            teacher=self._config.teacher,
            teacher_version=version,
            hinted_prompt_ids=hinted_ids,
            teacher_logprobs=teacher_logprobs,
            latency_s=latency_s,
        )

    def _hinted(self, turn: TurnRecord, max_tokens: int) -> tuple[str, Ids]:
        """The hint to score under, and the prompt ids that carry it. Raises HintingError."""
        assert turn.hint is not None, f"turn {turn.turn_id} is in scoring without a hint"
        hint: str | None = turn.hint
        if self._rewrite_hint is not None:
            hint = self._rewrite_hint(turn, turn.hint)
        if hint is not None:
            return hint, hinted_prompt_ids(
                self._rendering, turn.messages, turn.tools, turn.prompt_ids, hint, max_tokens
            )
        if len(turn.prompt_ids) > max_tokens:
            raise HintingError(
                DropReason.HINTED_PROMPT_TOO_LONG,
                f"{len(turn.prompt_ids)} ids, at most {max_tokens} fit",
            )
        return "", turn.prompt_ids

    def _check_frozen(self, info: ModelInfo) -> str:
        if self._version is None:
            self._version = info.weight_version
        if info.weight_version != self._version:
            raise TeacherChanged(
                f"the teacher must stay at weight version {self._version!r}, but reports "
                f"{info.weight_version!r}: start it again with its frozen weights, or begin a "
                "new run"
            )
        return self._version

    async def _commit(self, turn: TurnRecord, score: Score) -> None:
        problem = check_scores(score.teacher_logprobs, len(turn.response_ids))
        if problem is not None:
            await self._drop(turn, *problem)
        elif await self._store.commit_score(self._owner, score):
            self.metrics.count_scored(score)
        else:
            logger.warning("turn %s: the claim was lost, its score is not kept", score.turn_id)

    async def _drop(self, turn: TurnRecord, reason: DropReason, detail: str) -> None:
        if await self._store.drop(self._owner, turn.turn_id, reason, detail):
            self.metrics.count_dropped(reason)
            logger.info("turn %s dropped, %s: %s", turn.turn_id, reason.value, detail)
        else:
            logger.warning("turn %s: the claim was lost, it is not dropped", turn.turn_id)


def check_scores(teacher_logprobs: Logprobs, num_response: int) -> tuple[DropReason, str] | None:
    """Why these scores [R] cannot be used, or None: one finite log-prob <= 0 per response id."""
    if teacher_logprobs.shape != (num_response,):
        return (
            DropReason.TEACHER_MISALIGNED,
            f"{teacher_logprobs.shape} log-probs for {num_response} response ids",
        )
    num_bad = int(np.count_nonzero(~np.isfinite(teacher_logprobs)))
    if num_bad:
        return DropReason.TEACHER_LOGPROBS_INVALID, f"{num_bad} of {num_response} are not finite"
    # Rounding can lift a certain token's log-prob a little above 0.
    if float(teacher_logprobs.max()) > 1e-3:
        return DropReason.TEACHER_LOGPROBS_INVALID, f"log-prob {teacher_logprobs.max()} > 0"
    return None
