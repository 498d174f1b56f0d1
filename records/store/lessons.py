"""The store's methods for the rehearsal's lessons: claims, samples, scores, drops."""

from __future__ import annotations

from collections.abc import Sequence

from records.errors import UnknownTurn
from records.lessons import claiming, dropping, reading
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.types import Lesson, LessonSample, LessonScore, NewLesson
from records.store.base import StoreBase
from records.tables import loading


class LessonStore(StoreBase):
    """Lessons on their way to the trainer, which leases them with the turns."""

    async def add_lessons(self, lessons: Sequence[NewLesson]) -> int:
        """Store new lessons, to be sampled; returns how many. Those at a turn that was forgotten
        meanwhile are left out.
        """
        if not lessons:
            return 0
        return await self.write(claiming.add_op, lessons=lessons, now=self._clock())

    async def claim_lessons(
        self, state: LessonState, *, owner: str, limit: int, ttl_s: float
    ) -> list[Lesson]:
        """Claim up to `limit` lessons in `sampling` or `scoring` for `ttl_s` seconds: round robin
        by scope, the oldest of each scope first. Claims past their deadline are free again.
        """
        if state not in claiming.CLAIMABLE:
            raise ValueError(f"lessons in state {state} are not claimed by workers")
        if limit < 1:
            raise ValueError(f"a claim asks for at least one lesson, got {limit}")
        if not await self.read(claiming.any_free, state=state, now=self._clock()):
            return []
        taken = await self.write(
            claiming.claim_op,
            state=state,
            owner=owner,
            limit=limit,
            now=self._clock(),
            ttl_s=ttl_s,
            after=self.last_lesson_scopes.get(state, ""),
        )
        self.last_lesson_scopes[state] = taken.last_scope
        return await self.read(reading.load_lessons, lesson_ids=taken.lesson_ids)

    async def extend_lesson_claims(
        self, owner: str, lesson_ids: Sequence[str], ttl_s: float
    ) -> int:
        """Hold claims for another `ttl_s` from now; returns how many are still the owner's."""
        until = self._clock() + ttl_s
        return await self.write(claiming.extend_op, owner=owner, lesson_ids=lesson_ids, until=until)

    async def release_lessons(self, owner: str, lesson_ids: Sequence[str]) -> int:
        """Give claims back; returns how many were still the owner's."""
        return await self.write(claiming.release_op, owner=owner, lesson_ids=lesson_ids)

    async def commit_lesson_sample(self, owner: str, sample: LessonSample) -> bool:
        """sampling -> scoring. False, and nothing is written, if the claim is lost.

        The caller has searched its text for findings: one with a finding is dropped instead. Raises
        ValueError for a sample that could not train.
        """
        lesson = await self.lesson(sample.lesson_id)
        if lesson is None:
            return False
        try:
            prompt_ids, _ = await self.read(loading.turn_tokens, turn_id=lesson.state_turn_id)
        except UnknownTurn:  # forgotten while it was sampled
            return False
        versions = [span.version for span in sample.version_spans]
        row = reading.sample_row(sample, prompt_ids)
        return await self.write(
            claiming.sample_op,
            owner=owner,
            tokens=row,
            versions=(min(versions), max(versions)),
            now=self._clock(),
        )

    async def commit_lesson_score(self, owner: str, score: LessonScore) -> bool:
        """scoring -> ready. False, and nothing is written, if the claim is lost.

        Raises ValueError unless it has one finite log-prob per response id.
        """
        lesson = await self.lesson(score.lesson_id)
        if lesson is None or lesson.sample is None:
            return False
        now = self._clock()
        row = reading.score_row(score, lesson.sample, now)
        return await self.write(claiming.score_op, owner=owner, score=row, now=now)

    async def drop_lesson(
        self, owner: str, lesson_id: str, reason: LessonDrop, detail: str = ""
    ) -> bool:
        """A claimed or leased lesson -> dropped(reason). False if it is not the owner's."""
        return await self.write(
            claiming.drop_op,
            owner=owner,
            lesson_id=lesson_id,
            reason=reason,
            detail=detail,
            now=self._clock(),
        )

    async def drop_lessons_of(self, hint_id: str, reason: LessonDrop) -> int:
        """The lessons of a hint that are not trained, nor being trained on -> dropped(reason)."""
        return await self.write(
            dropping.drop_of_hint_op, hint_id=hint_id, reason=reason, now=self._clock()
        )

    async def drop_held_lessons(self) -> int:
        """Lessons that hold what hints taught, and are not being trained on -> dropped(stale): a
        step of another version must not hold it.
        """
        return await self.write(dropping.drop_held_op, now=self._clock())

    async def expire_lessons(self, *, oldest_allowed: int) -> int:
        """Sampled lessons with tokens of a version before `oldest_allowed` -> dropped(stale)."""
        return await self.write(
            claiming.expire_op, oldest_allowed=oldest_allowed, now=self._clock()
        )

    async def lesson_counts(self) -> dict[tuple[LessonKind, LessonState], int]:
        """Number of lessons on their way (neither trained nor dropped), by kind and state."""
        return await self.read(reading.counts)

    async def lesson_totals(self) -> dict[tuple[LessonKind, LessonState], int]:
        """Number of all lessons, by kind and state; for reports, not for frequent calls."""
        return await self.read(reading.totals)

    async def lessons_trained_by_hint(
        self, hint_ids: Sequence[str] | None = None
    ) -> dict[str, dict[LessonKind, int]]:
        """Number of trained lessons of each of these hints, by kind; None: of all, for reports."""
        return await self.read(reading.trained_by_hint, hint_ids=hint_ids)

    async def lesson_drops(self) -> dict[LessonDrop, int]:
        """Number of dropped lessons by reason."""
        return await self.read(reading.drops)

    async def lesson(self, lesson_id: str) -> Lesson | None:
        """A lesson by id."""
        found = await self.read(reading.load_lessons, lesson_ids=[lesson_id])
        return found[0] if found else None
