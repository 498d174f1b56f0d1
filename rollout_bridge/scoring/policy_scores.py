"""The policy's own scores of a response.

Of one that somebody else wrote, they stand in for the rollout log-probs that a recording lacks, and
their version is the one from which the turn ages. Of its own answers, they are the target that
keeps it as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from records.types import Ids, Logprobs, PolicyScore, TurnRecord
from rollout_bridge.engine.errors import ForeignTokens
from rollout_bridge.engine.types import ModelInfo, ScoredTokens
from rollout_bridge.scoring.teachers import Teacher, scores_of
from rollout_bridge.worker import ServiceUnavailable

_ATTEMPTS = 3
Answer = TypeVar("Answer")


class Versioned(Protocol):
    """An engine that says which version it serves."""

    async def model_info(self) -> ModelInfo: ...


class PolicyEngine(Versioned, Protocol):
    """What is needed from the policy's engine client."""

    async def score(
        self, input_ids: Ids, start: int, *, routing_key: str | None = None
    ) -> Logprobs: ...


class PolicyScorer:
    """Asks the policy's engine, and asks again if the weights changed meanwhile."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    async def score(self, turn: TurnRecord, ids: Ids) -> PolicyScore:
        """Log-probs [R] at temperature 1 of the turn's response, which `ids` end with.

        Raises EngineError, and ServiceUnavailable if versions change faster than it can score.
        """
        start = len(ids) - len(turn.response_ids)
        logprobs, version = await by_one_version(
            self._engine, lambda: self._engine.score(ids, start, routing_key=turn.session_id)
        )
        return PolicyScore(turn_id=turn.turn_id, version=version, logprobs=logprobs)


class OwnScores:
    """The policy as the teacher of its own answers: `top_k` as for other teachers."""

    def __init__(self, engine: Teacher, top_k: int) -> None:
        self._engine, self._top_k = engine, top_k

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, routing_key: str | None = None
    ) -> tuple[ScoredTokens, int]:
        """Its scores of `response_ids` [R] after `prompt_ids`, and the version that gave them.
        Raises EngineError, and ServiceUnavailable if versions change faster than it can score.
        """
        ids, start = np.concatenate([prompt_ids, response_ids]), len(prompt_ids)
        ask = partial(scores_of, self._engine, ids, start, self._top_k, routing_key=routing_key)
        try:
            return await by_one_version(self._engine, ask)
        except ValueError as error:
            raise ForeignTokens(f"ids that cannot be scored: {error}") from error


async def by_one_version(
    engine: Versioned, ask: Callable[[], Awaitable[Answer]]
) -> tuple[Answer, int]:
    """What `ask` returns, and the version of the weights that served all of it: it is called again
    if they changed meanwhile. Raises what it raises, EngineError, and ServiceUnavailable if
    versions change faster.
    """
    version = await served_version(engine)
    for _ in range(_ATTEMPTS):
        answer = await ask()
        after = await served_version(engine)
        if after == version:
            return answer, version
        version = after
    raise ServiceUnavailable("the policy's weights changed each time while it was asked of a turn")


async def served_version(engine: Versioned) -> int:
    """The version that the policy's engine serves now. Raises EngineError, and ServiceUnavailable
    if its label is not a number.
    """
    label = (await engine.model_info()).weight_version
    if label is None or not label.isdecimal():
        raise ServiceUnavailable(f"the policy engine reports no version number, but {label!r}")
    return int(label)
