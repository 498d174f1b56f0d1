"""One lesson's work, without the store: build the prompt, get an answer, have the teacher read it.

Training and measuring use the same code here, so that a gap measures what is taught.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from opd.rehearsal.places import Place, place_at, teacher_prompt
from opd.rehearsal.policy_sampler import Answer, PolicySampler
from records.lessons.names import LessonDrop
from records.names import DropReason
from records.types import Ids, Logprobs, TurnRecord
from rollout_bridge.engine.errors import EngineError, EngineProtocolError
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import HintingError
from rollout_bridge.scoring.policy_scores import OwnScores
from rollout_bridge.scoring.scoring import fault_of, scores_problem
from rollout_bridge.scoring.teachers import FrozenTeacher
from rollout_bridge.worker import ServiceUnavailable

_REASONS = {
    DropReason.HINTED_PROMPT_TOO_LONG: LessonDrop.PROMPT_TOO_LONG,
    DropReason.HINTED_PROMPT_MISMATCH: LessonDrop.PROMPT_MISMATCH,
    DropReason.NO_USER_MESSAGE: LessonDrop.PROMPT_MISMATCH,
}


def lesson_reason(reason: DropReason) -> LessonDrop:
    """The same reason as a lesson's. Raises ValueError for one that no lesson can have."""
    return _REASONS.get(reason) or LessonDrop(reason.value)


class LessonUnusable(Exception):
    """Nothing can be learned here; the lesson is dropped for `reason`."""

    def __init__(self, reason: LessonDrop, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A teacher's log-probs [R], and top-k [R, K] if requested, of an answer after `prompt_ids`
    [P'].
    """

    version: str
    prompt_ids: Ids
    logprobs: Logprobs
    topk_ids: Ids | None
    topk_logprobs: Logprobs | None


class Desk:
    """Makes lessons. All methods raise LessonUnusable, and ServiceUnavailable while an engine does
    not answer.
    """

    def __init__(
        self, rendering: Rendering, teacher: FrozenTeacher, own: OwnScores | None = None
    ) -> None:
        self._rendering = rendering
        self.teacher = teacher
        self._own = own

    @property
    def knows_policy(self) -> bool:
        """Whether `score_own` can be asked."""
        return self._own is not None

    async def place(self, turn: TurnRecord, words: str | None = None) -> Place:
        """A recorded state, with `words` added to its last user message."""
        try:
            limit = await self.teacher.max_tokens()
            # In a thread: rendering a long conversation would hold up the other lessons.
            return await asyncio.to_thread(place_at, self._rendering, turn, words, limit)
        except (HintingError, EngineError) as error:
            raise _unusable(error) from error

    async def answer(self, engine: PolicySampler, place: Place) -> Answer:
        """One whole answer there."""
        try:
            answer = await engine.answer(
                place.prompt_ids,
                place.turn.tools,
                turn_type=place.turn.turn_type,
                routing_key=place.turn.session_id,
                enable_thinking=place.enable_thinking,
            )
        except EngineProtocolError as error:
            raise LessonUnusable(LessonDrop.ROLLOUT_LOGPROBS_INVALID, str(error)) from error
        except EngineError as error:
            raise _unusable(error) from error
        if answer.drop is DropReason.ABORTED:
            raise ServiceUnavailable("the engine aborted an answer")
        return answer

    async def score(self, place: Place, hint: str | None, response_ids: Ids) -> Scored:
        """The teacher's scores of an answer [R], under `hint` if there is one."""
        try:
            limit = await self.teacher.max_tokens() - len(response_ids)
            prompt = await asyncio.to_thread(teacher_prompt, self._rendering, place, hint, limit)
            found = await self.teacher.score(
                prompt, response_ids, routing_key=place.turn.session_id
            )
        except (HintingError, EngineError) as error:
            raise _unusable(error) from error
        return _checked(
            Scored(
                version=found.version,
                prompt_ids=prompt,
                logprobs=found.logprobs,
                topk_ids=found.topk_ids,
                topk_logprobs=found.topk_logprobs,
            ),
            len(response_ids),
        )

    async def score_own(self, place: Place, response_ids: Ids) -> Scored:
        """The scores that the policy itself gives its answer [R]: what keeps it as it is."""
        assert self._own is not None, "this desk does not know the policy"
        try:
            scored, version = await self._own.score(
                place.prompt_ids, response_ids, routing_key=place.turn.session_id
            )
        except EngineError as error:
            raise _unusable(error) from error
        return _checked(
            Scored(
                version=str(version),
                prompt_ids=place.prompt_ids,
                logprobs=scored.logprobs,
                topk_ids=scored.topk_ids,
                topk_logprobs=scored.topk_logprobs,
            ),
            len(response_ids),
        )


def _checked(scored: Scored, length: int) -> Scored:
    problem = scores_problem(scored.logprobs, scored.topk_logprobs, length)
    if problem is not None:
        raise LessonUnusable(lesson_reason(problem[0]), problem[1])
    return scored


def _unusable(error: HintingError | EngineError) -> LessonUnusable:
    reason, detail = fault_of(error)
    return LessonUnusable(lesson_reason(reason), detail)
