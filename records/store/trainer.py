"""The store's methods for the trainer: leases, steps and policy versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from records.lessons import reading
from records.names import TurnState
from records.queue import freshness
from records.queue.freshness import Untrained
from records.store.base import StoreBase
from records.training import ready_samples, reconcile, training
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeRewards, rewarded
from records.training.reconcile import Chain, ReconcileReport
from records.training.share import UNCAPPED, LessonShares, Share
from records.training.step_results import SampleResult
from records.types import PolicyVersion, ReadySample


class TrainerStore(StoreBase):
    """Leases of ready turns, and the steps that trained them."""

    async def lease(
        self,
        *,
        owner: str,
        count: int,
        ttl_s: float,
        whole_sessions: bool = False,
        share: Share = UNCAPPED,
        lessons: LessonShares | None = None,
        history: HistoryWindow | None = None,
        outcomes: OutcomeRewards | None = None,
        repeats: bool = False,
    ) -> list[ReadySample]:
        """`count` ready turns -> leased, or [] if there are fewer, or fewer within the `share` that
        one scope may have. Round robin by scope, the oldest of each first.

        With shares for `lessons` a part of the batch are counter- and keep-lessons, and lessons of
        hints fill up the turns. With `whole_sessions` all other ready turns of their sessions are
        leased with them, beyond any share. With `history` each sample has the earlier answers to
        its prompt. With `outcomes` rewards are made from sessions' outcomes, and turns wait for
        them (`drop_without_outcome` ends the wait). With `repeats` turns that may train again fill
        places that ready ones leave.
        """
        if count < 1:
            raise ValueError(f"a lease asks for at least one turn, got {count}")
        if not await self.read(
            training.enough_ready,
            count=count,
            now=self._clock(),
            lessons=lessons is not None,
            outcomes=outcomes,
            repeats=repeats,
        ):
            return []
        taken = await self.write(
            training.lease_op,
            owner=owner,
            count=count,
            now=self._clock(),
            ttl_s=ttl_s,
            whole_sessions=whole_sessions,
            share=share,
            after=self.last_scopes.get(TurnState.READY, ""),
            lessons=lessons,
            outcomes=outcomes,
            repeats=repeats,
        )
        self.last_scopes[TurnState.READY] = taken.last_scope
        turns = await self.read(
            ready_samples.load_samples,
            turn_ids=taken.turn_ids,
            window=history,
            with_outcomes=outcomes is not None,
        )
        if outcomes is not None:
            turns = [rewarded(one, outcomes.kind) for one in turns]
        return [
            *turns,
            *await self.read(reading.load_samples, lesson_ids=taken.lesson_ids),
        ]

    async def expire_stale(self, *, oldest_allowed: int) -> int:
        """Ready turns with tokens of a version before `oldest_allowed` -> dropped(stale); trained
        ones no longer train.
        """
        return await self.write(
            training.expire_op, oldest_allowed=oldest_allowed, now=self._clock()
        )

    async def extend_leases(self, owner: str, ttl_s: float) -> int:
        """Hold all leases of `owner` for another `ttl_s` from now; returns how many."""
        until = self._clock() + ttl_s
        return await self.write(training.extend_leases_op, owner=owner, until=until)

    async def release_leases(self, owner: str) -> int:
        """All leases of `owner` -> ready, or trained as before; returns how many."""
        return await self.write(training.release_op, owner=owner, now=self._clock())

    async def commit_step(
        self,
        *,
        version: PolicyVersion,
        results: Sequence[SampleResult],
        lessons: Sequence[SampleResult] = (),
        replay_times: int = 1,
    ) -> None:
        """Insert the policy version and what it made of turns and `lessons` (whose ids their
        results name); leased -> trained. After that a turn may train again until it has trained
        `replay_times`. One transaction.

        Raises StoreConflict if the version number is taken or a turn or lesson is not leased.
        """
        await self.write(
            training.commit_step_op,
            version=version,
            results=results,
            lessons=lessons,
            now=self._clock(),
            replay_times=replay_times,
        )

    async def commit_handed_over(
        self,
        *,
        owner: str,
        version: PolicyVersion,
        turn_ids: Sequence[str],
        lesson_ids: Sequence[str] = (),
    ) -> None:
        """A step that another process took on the leases of `owner`: leased -> trained.

        What training did with each turn or lesson is not kept. One transaction; the same step again
        changes nothing. Raises StoreConflict if the version number is taken or a turn or lesson is
        not leased by `owner`.
        """
        await self.write(
            training.commit_handed_over_op,
            version=version,
            turn_ids=turn_ids,
            lesson_ids=lesson_ids,
            owner=owner,
            now=self._clock(),
        )

    async def reconcile(
        self,
        chain: Chain,
        lessons: Chain = (),
        repeated: Collection[str] = (),
        replay_times: int = 1,
    ) -> ReconcileReport:
        """Make versions and trained turns equal to the surviving manifests, oldest first; `lessons`
        are the lessons of the same versions, and `repeated` are turns that several trained.

        Raises StoreConflict if the chain trained a turn that is not `repeated`, or a lesson, twice
        or contradicts a stored manifest.
        """
        return await self.write(
            reconcile.reconcile_op,
            chain=chain,
            lessons=lessons,
            repeated=frozenset(repeated),
            replay_times=replay_times,
            now=self._clock(),
        )

    async def next_version(self) -> int:
        """A version number that was never used."""
        return await self.read(training.next_version)

    async def highest_version(self) -> int:
        """The highest version number that a step or a sampled token has; 0 if there is none."""
        return await self.read(training.highest_version)

    async def versions_given_up(self) -> set[int]:
        """Versions that the policy has left: abandoned, or withdrawn by a rollback."""
        return await self.read(training.versions_given_up)

    async def newest_versions(self, limit: int) -> list[PolicyVersion]:
        """The newest versions, newest first, including those that were given up."""
        return await self.read(training.newest_versions, limit=limit)

    async def latest_version(self) -> PolicyVersion | None:
        """The newest version that is not abandoned."""
        return await self.read(training.latest_version)

    async def is_start(self, version: int) -> bool:
        """Whether a version has the weights of the start: version 0, or on a cluster the number
        under which a job serves them.
        """
        return await self.read(training.is_start, version=version)

    async def untrained(self, most: int) -> Untrained:
        """How many live turns may train, counted up to `most` in each state."""
        return await self.read(freshness.untrained, most=most)

    async def ready_count(
        self, outcomes: OutcomeRewards | None = None, repeats: bool = False
    ) -> int:
        """Number of turns that wait for a trainer: with `outcomes` without those that wait for
        their sessions' outcomes, with `repeats` including those that may train again.
        """
        return await self.read(
            training.ready_count, outcomes=outcomes, now=self._clock(), repeats=repeats
        )

    async def drop_without_outcome(self, outcomes: OutcomeRewards) -> int:
        """Ready turns without an outcome to come or a hint to train on -> dropped(no_outcome)."""
        now = self._clock()
        if not await self.read(training.any_without_outcome, outcomes=outcomes, now=now):
            return 0
        return await self.write(training.without_outcome_op, outcomes=outcomes, now=now)
