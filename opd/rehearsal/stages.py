"""The two stages of a lesson, on the same claim loop as turns.

    sampling: the policy answers at the state          scoring: the frozen teacher reads the answer

Both learn of a lesson only from its row, so that either may die at any instruction. What does not
fit exactly is dropped with a reason; if an engine is down, they wait for it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.rehearsal.desk import Desk, LessonUnusable, lesson_reason
from opd.rehearsal.losses import TextLosses
from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.places import Place
from opd.rehearsal.policy_sampler import PolicySampler
from records.hints.types import LIVE_STATUSES, Hint, HintStatus
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.types import Lesson, LessonSample, LessonScore
from records.names import DropReason
from records.types import TurnRecord
from rollout_bridge.worker import ServiceUnavailable

logger = logging.getLogger(__name__)

_TAUGHT = {
    LessonKind.HINT: (HintStatus.ACTIVE,),
    # What other hints or its own turns teach may cost a resting hint its open wishes.
    LessonKind.COUNTER: LIVE_STATUSES,
    LessonKind.KEEP: LIVE_STATUSES,
}
"""Statuses of hints that get lessons, by the lessons' kind."""
POLICY = "policy"
"""Name of the teacher of a lesson that keeps the policy as it is."""


@dataclass(frozen=True, slots=True)
class ClaimedLesson:
    """A lesson in the form that the claim loop expects."""

    lesson: Lesson

    @property
    def turn_id(self) -> str:
        """The lesson's id."""
        return self.lesson.lesson_id


class LessonClaims:
    """The store's lessons under the names by which the claim loop asks for turns."""

    def __init__(self, store: RehearsalStore) -> None:
        self._store = store

    async def claim(
        self, state: LessonState, *, owner: str, limit: int, ttl_s: float
    ) -> list[ClaimedLesson]:
        """Claim up to `limit` lessons."""
        found = await self._store.claim_lessons(state, owner=owner, limit=limit, ttl_s=ttl_s)
        return [ClaimedLesson(lesson) for lesson in found]

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object:
        """Hold claims for longer."""
        return await self._store.extend_lesson_claims(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """Release claims."""
        return await self._store.release_lessons(owner, turn_ids)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """Drop a claimed lesson."""
        return await self._store.drop_lesson(owner, turn_id, lesson_reason(reason), detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a lesson's row refers to: its state, hint and words."""

    turn: TurnRecord
    hint: Hint | None
    words: str | None


async def facts_of(store: RehearsalStore, lesson: Lesson) -> Facts:
    """Look these up. Raises LessonUnusable if one of them is gone, or if its hint has ended."""
    hint, words = None, None
    if lesson.hint_id is not None:
        hint = await store.hint(lesson.hint_id)
        if hint is None or hint.status not in _TAUGHT[lesson.kind]:
            status = "gone" if hint is None else hint.status.value
            raise LessonUnusable(LessonDrop.HINT_ENDED, f"the hint is {status}")
    if lesson.prompt_id is not None:
        assert lesson.hint_id is not None
        prompts = {one.prompt_id: one for one in await store.hint_prompts(lesson.hint_id)}
        prompt = prompts.get(lesson.prompt_id)
        if prompt is None or prompt.dropped is not None:
            raise LessonUnusable(LessonDrop.HINT_ENDED, "its words are no longer used")
        words = prompt.text
    turns = await store.load_turns([lesson.state_turn_id])
    if not turns or not len(turns[0].prompt_ids):
        raise LessonUnusable(LessonDrop.FORGOTTEN, "its state is gone")
    return Facts(turn=turns[0], hint=hint, words=words)


class _LessonStage:
    """What both stages share."""

    def __init__(self, store: RehearsalStore, owner: str) -> None:
        self._store, self._owner = store, owner
        self.dropped: Counter[LessonDrop] = Counter()
        """Since this process began."""

    async def process(self, turn: ClaimedLesson) -> None:
        """Work on one lesson and commit, or drop it. Raises ServiceUnavailable."""
        lesson = turn.lesson
        try:
            is_kept = await self._advance(lesson)
        except LessonUnusable as error:
            await self._drop(lesson, error.reason, error.detail)
        else:
            if not is_kept:
                logger.warning("lesson %s: the claim was lost", lesson.lesson_id)

    async def give_up(self, turn: ClaimedLesson, error: ServiceUnavailable) -> None:
        """Drop a lesson for which an engine never gave an answer."""
        await self._drop(turn.lesson, LessonDrop.ENGINE_UNAVAILABLE, str(error))

    async def _advance(self, lesson: Lesson) -> bool:
        raise NotImplementedError

    async def _drop(self, lesson: Lesson, reason: LessonDrop, detail: str) -> None:
        if await self._store.drop_lesson(self._owner, lesson.lesson_id, reason, detail):
            self.dropped[reason] += 1
            logger.info("lesson %s dropped, %s: %s", lesson.lesson_id, reason.value, detail)


class SamplingStage(_LessonStage):
    """The policy answers."""

    def __init__(
        self,
        store: RehearsalStore,
        policy: PolicySampler,
        desk: Desk,
        owner: str,
    ) -> None:
        super().__init__(store, owner)
        self._policy, self._desk = policy, desk

    @property
    def state(self) -> LessonState:
        """The state from which lessons are claimed."""
        return LessonState.SAMPLING

    async def _advance(self, lesson: Lesson) -> bool:
        facts = await facts_of(self._store, lesson)
        place = await self._desk.place(facts.turn, facts.words)
        answer = await self._desk.answer(self._policy, place)
        if answer.drop is not None:
            raise LessonUnusable(lesson_reason(answer.drop), "")
        [clean] = await self._store.redact(self._store.redactor.messages, [answer.message])
        if clean is not answer.message:
            raise LessonUnusable(
                LessonDrop.SENSITIVE, "the answer contains what must not be stored"
            )
        sample = LessonSample(
            lesson_id=lesson.lesson_id,
            prompt_ids=place.prompt_ids,
            response_ids=np.asarray(answer.rollout.ids, dtype=np.int32),
            rollout_logprobs=np.asarray(answer.rollout.logprobs, dtype=np.float32),
            version_spans=answer.version_spans,
            sampling=answer.sampling,
            finish_reason=answer.rollout.finish_reason or "abort",
        )
        return await self._store.commit_lesson_sample(self._owner, sample)


class ScoringStage(_LessonStage):
    """The frozen teacher reads the answer, under the hint or as the policy read it; of a lesson
    that keeps what a hint taught, the policy does.
    """

    def __init__(self, store: RehearsalStore, desk: Desk, losses: TextLosses, owner: str) -> None:
        super().__init__(store, owner)
        self._desk, self._losses = desk, losses

    @property
    def state(self) -> LessonState:
        """The state from which lessons are claimed."""
        return LessonState.SCORING

    async def _advance(self, lesson: Lesson) -> bool:
        sample = lesson.sample
        assert sample is not None, f"lesson {lesson.lesson_id} is in scoring without a sample"
        facts = await facts_of(self._store, lesson)
        hint = None
        if lesson.kind is LessonKind.HINT:
            assert facts.hint is not None
            hint = facts.hint.text
        place = Place(turn=facts.turn, messages=facts.turn.messages, prompt_ids=sample.prompt_ids)
        teacher = self._desk.teacher.name
        if lesson.holds:
            teacher = POLICY
            found = await self._desk.score_own(place, sample.response_ids)
            if any(str(span.version) != found.version for span in sample.version_spans):
                raise LessonUnusable(LessonDrop.STALE, f"version {found.version} is served by now")
        else:
            found = await self._desk.score(place, hint, sample.response_ids)
        score = LessonScore(
            lesson_id=lesson.lesson_id,
            hint=hint or "",
            teacher=teacher,
            teacher_version=found.version,
            teacher_prompt_ids=found.prompt_ids,
            teacher_logprobs=found.logprobs,
            topk_ids=found.topk_ids,
            topk_logprobs=found.topk_logprobs,
        )
        is_kept = await self._store.commit_lesson_score(self._owner, score)
        if is_kept and lesson.prompt_id is not None:
            self._losses.add(lesson.prompt_id, sample.rollout_logprobs, found.logprobs)
        return is_kept
