"""The policy's log-probs of a response that somebody else wrote. They stand in for the rollout
log-probs that a recording lacks, and their version is the one from which the turn ages.
"""

from __future__ import annotations

from typing import Protocol

from records.types import Ids, Logprobs, PolicyScore, TurnRecord
from rollout_bridge.engine.types import ModelInfo
from rollout_bridge.worker import ServiceUnavailable

_ATTEMPTS = 3


class PolicyEngine(Protocol):
    """What is needed from the policy's engine client."""

    async def score(
        self, input_ids: Ids, start: int, *, routing_key: str | None = None
    ) -> Logprobs: ...
    async def model_info(self) -> ModelInfo: ...


class PolicyScorer:
    """Asks the policy's engine, and asks again if the weights changed meanwhile."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    async def score(self, turn: TurnRecord, ids: Ids) -> PolicyScore:
        """Log-probs [R] at temperature 1 of the turn's response, which `ids` end with.

        Raises EngineError, and ServiceUnavailable if versions change faster than it can score.
        """
        start = len(ids) - len(turn.response_ids)
        version = await served_version(self._engine)
        for _ in range(_ATTEMPTS):
            logprobs = await self._engine.score(ids, start, routing_key=turn.session_id)
            after = await served_version(self._engine)
            if after == version:
                return PolicyScore(turn_id=turn.turn_id, version=version, logprobs=logprobs)
            version = after
        raise ServiceUnavailable("the policy's weights changed each time while it scored a turn")


async def served_version(engine: PolicyEngine) -> int:
    """The version that the policy's engine serves now. Raises EngineError, and ServiceUnavailable
    if its label is not a number.
    """
    label = (await engine.model_info()).weight_version
    if label is None or not label.isdecimal():
        raise ServiceUnavailable(f"the policy engine reports no version number, but {label!r}")
    return int(label)
