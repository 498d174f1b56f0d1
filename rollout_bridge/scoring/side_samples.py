"""Side samples where the trainer keeps no weights to draw them with: the scoring stage makes them.

    drawn by the policy that serves when the turn is scored, or its likeliest tokens
    -> scored by the turn's teacher under the selected hint -> stored with its scores

The version that drew them is stored too. The trainer corrects for what it learns afterwards by the
ratio of its own log-probs to those stored (ALGORITHMS 5.2, 5.4).

A draw is one of the policy's whole distribution at temperature 1. One request gives the log-probs
of the `_HEAD` likeliest tokens at each of `_STRETCH` positions, and so the probability of all the
others together. A draw that falls among the likeliest is made here, by these probabilities. Those
of a position that fall among the others are sampled by the engine, which is told to leave the
likeliest out, and scored by it as they are. Thus the distribution is the engine's, but only some
positions need requests of their own: each request carries the whole prompt, so one for each token
would make a long response expensive. It knows neither store nor objective.

Shapes: S positions of a stretch, R of a response, K likeliest tokens, m side samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from records.names import DropReason, SideSource
from records.types import Ids, Logprobs, Score, SideSamples, TurnRecord
from rollout_bridge.engine.client import MOST_DRAWS, TOKENS_STRETCH
from rollout_bridge.engine.errors import EngineProtocolError, ForeignTokens
from rollout_bridge.engine.types import Generation, SamplingParams, ScoredTokens
from rollout_bridge.scoring.hinting import HintingError
from rollout_bridge.scoring.policy_scores import Versioned, by_one_version
from rollout_bridge.scoring.scoring import check_scores
from rollout_bridge.scoring.teachers import FrozenTeacher
from rollout_bridge.together import all_or_none
from rollout_bridge.worker import ServiceUnavailable

_HEAD = 128
_STRETCH = 128
_AT_ONCE = 16
_OUT = -100.0
"""Added to a logit that is not to be sampled."""

Answer = TypeVar("Answer")


class DrawingEngine(Versioned, Protocol):
    """What is needed from the policy's engine client."""

    async def draw(
        self, input_ids: Ids, params: SamplingParams, number: int, *, routing_key: str | None = None
    ) -> list[Generation]: ...
    async def score_with_topk(
        self, input_ids: Ids, start: int, k: int, *, routing_key: str | None = None
    ) -> ScoredTokens: ...
    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """ids and log-probs [R, m] at temperature 1, the version that they are of, and how many
    requests they took.
    """

    ids: Ids
    logprobs: Logprobs
    version: int
    num_requests: int


class SideSampler:
    """Makes `size` side samples per position from the policy's engine; at most `_AT_ONCE` requests
    of all its callers are under way. `vocab_size`: ids that the policy has.
    """

    def __init__(
        self,
        engine: DrawingEngine,
        source: SideSource,
        size: int,
        *,
        vocab_size: int,
    ) -> None:
        if source is SideSource.TEACHER:
            raise ValueError("what the teacher draws, a teacher in the trainer draws there")
        self._engine, self._source = engine, source
        draws = source is SideSource.POLICY
        self._size = size
        self._num_top = min(_HEAD, vocab_size) if draws else size
        self._is_all = self._num_top == vocab_size
        self._generator = np.random.default_rng()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def make(
        self, turn: TurnRecord, teacher: FrozenTeacher, score: Score
    ) -> tuple[SideSamples, int]:
        """The side samples of a turn, scored under the hinted prompt of `score`, and how many
        requests the policy answered for them.

        Raises HintingError for answers that cannot be used, EngineError, TeacherChanged, and
        ServiceUnavailable if the policy's weights change faster than it can draw.
        """
        try:
            drawn = await self.draw(turn.prompt_ids, turn.response_ids, turn.session_id)
        except ForeignTokens:
            raise
        except EngineProtocolError as error:
            # The policy's fault, which must not be reported as the teacher's.
            raise HintingError(DropReason.ROLLOUT_LOGPROBS_INVALID, str(error)) from error
        taught = await teacher.score_tokens(
            np.concatenate([score.hinted_prompt_ids, turn.response_ids]),
            len(score.hinted_prompt_ids),
            drawn.ids,
            routing_key=turn.session_id,
        )
        problem = check_scores(taught.ravel(), drawn.ids.size)
        if problem is not None:
            raise HintingError(*problem)
        samples = SideSamples(
            ids=drawn.ids,
            rollout_logprobs=drawn.logprobs,
            teacher_logprobs=taught,
            policy_version=drawn.version,
            source=self._source,
        )
        return samples, drawn.num_requests

    async def draw(self, prompt_ids: Ids, response_ids: Ids, routing_key: str) -> Drawn:
        """What one version of the policy has at each position of the response. Raises EngineError,
        and ServiceUnavailable if its weights change faster than it can draw.
        """
        ids = np.concatenate([prompt_ids, response_ids])
        asked = _Asked(self._engine, self._slots, routing_key)

        async def parts() -> list[tuple[Ids, Logprobs]]:
            # One after another: each finds in the cache what the one before computed.
            return [
                await self._stretch(ids[: first + _STRETCH], first, asked)
                for first in range(len(prompt_ids), len(ids), _STRETCH)
            ]

        found, version = await by_one_version(self._engine, parts)
        return Drawn(
            ids=np.concatenate([part for part, _ in found]),
            logprobs=np.concatenate([part for _, part in found]),
            version=version,
            num_requests=asked.number,
        )

    async def _stretch(self, ids: Ids, first: int, asked: _Asked) -> tuple[Ids, Logprobs]:
        """ids and log-probs [S, m] at the positions of `ids` from `first`."""
        head_ids_SK, head_SK = await asked.likeliest(ids, first, self._num_top)
        if self._source is SideSource.POLICY_TOP:
            return head_ids_SK, head_SK
        places_Sm = draw_places(head_SK, self._size, self._generator, is_all=self._is_all)
        others_Sm = places_Sm == self._num_top
        known_Sm = np.where(others_Sm, 0, places_Sm)
        ids_Sm = np.take_along_axis(head_ids_SK, known_Sm, axis=1)
        logprobs_Sm = np.take_along_axis(head_SK, known_Sm, axis=1)
        rows = np.flatnonzero(others_Sm.any(axis=1)).tolist()
        numbers = others_Sm.sum(axis=1).tolist()
        drawn = await all_or_none(
            [asked.others(ids[: first + row], head_ids_SK[row], numbers[row]) for row in rows]
        )
        for row, tokens in zip(rows, drawn, strict=True):
            ids_Sm[row, others_Sm[row]] = tokens
        for block, logprobs in await asked.blocks(ids, first, ids_Sm, rows):
            logprobs_Sm[block] = np.where(others_Sm[block], logprobs, logprobs_Sm[block])
        return ids_Sm, logprobs_Sm


def draw_places(
    head_SK: Logprobs, number: int, generator: np.random.Generator, *, is_all: bool
) -> NDArray[np.intp]:
    """Independent draws [S, number]: places 0 to K - 1 by their log-probs, K with the probability
    that these leave. `is_all`: they leave none but for rounding.
    """
    up_to_SK = np.exp(head_SK.astype(np.float64)).cumsum(axis=1)
    if is_all:
        up_to_SK /= up_to_SK[:, -1:]
    points_Sm = generator.random((len(head_SK), number))
    return np.stack(
        [
            np.searchsorted(up_to, points, side="right")
            for up_to, points in zip(up_to_SK, points_Sm, strict=True)
        ]
    )


class _Asked:
    """The requests about one turn, counted; each waits for a free slot. ValueError of the client,
    for ids that the policy lacks, becomes ForeignTokens.
    """

    def __init__(self, engine: DrawingEngine, slots: asyncio.Semaphore, routing_key: str) -> None:
        self._engine, self._slots, self._key = engine, slots, routing_key
        self.number = 0

    async def likeliest(self, ids: Ids, first: int, number: int) -> tuple[Ids, Logprobs]:
        """The likeliest tokens at the positions of `ids` from `first`: ids, log-probs [S, number],
        the likeliest first.
        """
        found = await self._one(
            lambda: self._engine.score_with_topk(ids, first, number, routing_key=self._key)
        )
        assert found.topk_ids is not None
        assert found.topk_logprobs is not None
        return found.topk_ids, found.topk_logprobs

    async def others(self, ids: Ids, head: Ids, number: int) -> Ids:
        """Draws [number] of what follows `ids`, given that it is not in `head` [K]."""
        params = SamplingParams(
            max_new_tokens=1, logit_bias=tuple((token, _OUT) for token in head.tolist())
        )
        drawn: list[int] = []
        while len(drawn) < number:
            missing = min(number - len(drawn), MOST_DRAWS)
            found = await self._one(
                lambda missing=missing: self._engine.draw(
                    ids, params, missing, routing_key=self._key
                )
            )
            if any(one.finish_reason == "abort" for one in found):
                raise ServiceUnavailable("the policy's engine aborted a draw of side samples")
            tokens = [token for one in found for token in one.output_ids.tolist()]
            wrong = set(tokens).intersection(head.tolist())
            if wrong or len(tokens) != missing:
                raise EngineProtocolError(
                    f"the policy's engine sampled {len(tokens)} tokens of {missing}, among them "
                    f"{sorted(wrong)}, which logit_bias leaves out"
                )
            drawn += tokens
        return np.array(drawn, dtype=np.int32)

    async def blocks(
        self, ids: Ids, first: int, tokens_Sm: Ids, rows: Sequence[int]
    ) -> list[tuple[slice, Logprobs]]:
        """Log-probs of tokens at the positions of `ids` from `first` on, in blocks of
        `TOKENS_STRETCH` positions: those that contain a place of `rows`. One request each.
        """
        starts = sorted({row - row % TOKENS_STRETCH for row in rows})
        found = [slice(start, start + TOKENS_STRETCH) for start in starts]
        scored = await all_or_none(
            [self._scores(ids, first + one.start, tokens_Sm[one]) for one in found]
        )
        return list(zip(found, scored, strict=True))

    async def _scores(self, ids: Ids, at: int, tokens: Ids) -> Logprobs:
        return await self._one(
            lambda: self._engine.score_tokens(
                ids[: at + len(tokens)], at, tokens, routing_key=self._key
            )
        )

    async def _one(self, request: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._slots:
            self.number += 1
            try:
                return await request()
            except ValueError as error:
                raise ForeignTokens(f"ids that the policy does not have: {error}") from error
