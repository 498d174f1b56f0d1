"""The policy as the verifier's worker uses it: one more answer to a turn's prompt."""

from __future__ import annotations

from opd.rehearsal.policy_sampler import PolicySampler
from records.messages import Message
from records.types import TurnRecord
from rollout_bridge.engine.errors import EngineError, EngineRejected
from rollout_bridge.worker import ServiceUnavailable


class PolicyContinues:
    """Answers recorded prompts again."""

    def __init__(self, sampler: PolicySampler) -> None:
        self._sampler = sampler

    async def answer_again(self, turn: TurnRecord) -> Message | None:
        """Implements `Continues`."""
        try:
            answer = await self._sampler.answer(
                turn.prompt_ids,
                turn.tools,
                routing_key=turn.session_id,
                enable_thinking=turn.sampling.get("enable_thinking"),
            )
        except EngineRejected:
            return None
        except EngineError as error:
            raise ServiceUnavailable(f"the policy's engine: {error}") from error
        return answer.message if answer.rollout.finish_reason == "stop" else None
