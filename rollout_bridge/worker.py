"""The loop that every stage shares: claim turns, compute, commit; at most `concurrency` turns at a
time.

A stage (judge, teacher scoring) defines what happens to one turn. The loop knows nothing of votes
or log-probs. It keeps turns flowing (a finished turn makes room for the next at once, there are no
batches in lockstep), keeps its claims alive, and gives them back when it stops. If the service of a
stage does not answer, nothing is dropped. The turn is set aside (still claimed, so that the queue
moves on), and the loop sends one turn at a time, with growing pauses, until one succeeds.

A turn is given up in two cases only. It failed `max_attempts` times while other turns succeeded in
between: then the turn is at fault, not the service. Or it has been failing for `give_up_after_s`.
An unplanned exception of the stage counts as such a failure: one odd turn ends as `internal_error`,
and a mistake in the program, which affects every turn, costs none. A loop that is killed leaves its
claims to expire; nothing else is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from records.errors import StoreError, StoreUnavailable
from records.names import DropReason, TurnState
from records.types import TurnRecord
from rollout_bridge.config import ClaimLoopConfig

logger = logging.getLogger(__name__)


class ServiceUnavailable(Exception):
    """The service of a stage gave no usable answer for a turn; the same turn may succeed later.

    `retry_after_s`: how long the service asks to be left alone, if it does.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnplannedError(ServiceUnavailable):
    """A stage raised an unplanned exception. Whether other turns succeed shows whether the turn or
    the program is at fault.
    """


class StageStopped(RuntimeError):
    """The stage cannot process any turn until somebody changes something: the loop must end."""


class Claimed(Protocol):
    """What is claimed: a turn, or whatever else waits in the store like a turn."""

    @property
    def turn_id(self) -> str:
        """Its id in the store; for a lesson, the lesson's id."""
        ...


Item = TypeVar("Item", bound=Claimed)
_Given = TypeVar("_Given", bound=Claimed, covariant=True)
_Taken = TypeVar("_Taken", bound=Claimed, contravariant=True)
_State = TypeVar("_State", contravariant=True)
_Of = TypeVar("_Of", covariant=True)


class Claims(Protocol[_State, _Given]):
    """What the loop needs from the store."""

    async def claim(
        self, state: _State, *, owner: str, limit: int, ttl_s: float
    ) -> Sequence[_Given]: ...
    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object: ...
    async def release(self, owner: str, turn_ids: Sequence[str]) -> object: ...
    async def drop(
        self, owner: str, turn_id: str, reason: DropReason, detail: str = ""
    ) -> bool: ...


class ClaimStore(Claims[TurnState, TurnRecord], Protocol):
    """What a loop over turns needs from the store."""


class Stage(Protocol[_Of, _Taken]):
    """What happens to one claimed turn."""

    @property
    def state(self) -> _Of:
        """The state from which turns are claimed."""
        ...

    async def process(self, turn: _Taken, /) -> None:
        """Compute and commit (advance or drop) one turn. Raises ServiceUnavailable or StageStopped,
        changing nothing.
        """
        ...

    async def give_up(self, turn: _Taken, error: ServiceUnavailable, /) -> None:
        """Drop a turn for which the service never gave an answer."""
        ...


@dataclass(slots=True, kw_only=True)
class _SetAside(Generic[Item]):
    """A claimed turn that waits for its next attempt (times on the monotonic clock)."""

    turn: Item
    error: ServiceUnavailable
    first_failed_at: float
    attempts: int
    successes_seen: int
    not_before: float


class ClaimLoop(Generic[Item]):
    """Runs one stage over the store until told to stop. One instance runs once."""

    def __init__(
        self,
        store: Claims[Any, Item],
        stage: Stage[Any, Item],
        *,
        owner: str,
        config: ClaimLoopConfig,
    ) -> None:
        self._store, self._stage, self._owner, self._config = store, stage, owner, config
        self._tasks: dict[asyncio.Task[None], Item] = {}
        self._aside: dict[str, _SetAside[Item]] = {}
        self._wake = asyncio.Event()
        self._num_successes = 0
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._next_claim_at = 0.0
        self._poll_s = config.poll_min_s

    @property
    def failures_in_a_row(self) -> int:
        """Failures of the service since its last success; 0: as far as is known, it is up."""
        return self._failures_in_a_row

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then finish or release what is in flight.

        StageStopped, and a StoreError other than StoreUnavailable, end the loop and are raised
        here, after all claims have been given back.
        """
        stopping = asyncio.create_task(self._wake_on(stop))
        extending = asyncio.create_task(self._extend_claims())
        try:
            while not stop.is_set():
                self._collect_finished()
                if extending.done():
                    extending.result()
                self._wake.clear()
                await self._start_turns()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._seconds_until_next_look())
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._config.stop_grace_s)
            self._collect_finished()
        finally:
            await self._shut_down(stopping, extending)

    async def _start_turns(self) -> None:
        if time.monotonic() < self._paused_until:
            return
        if self._failures_in_a_row:
            # One turn at a time finds out whether the service is back: a fresh one if there is one,
            # since those set aside may themselves be the trouble.
            await self._claim(1)
            self._start_set_aside(1)
        else:
            # Those set aside go first: a long queue must not keep them waiting forever.
            self._start_set_aside(self._config.concurrency)
            await self._claim(self._config.concurrency)

    def _start_set_aside(self, width: int) -> None:
        now = time.monotonic()
        for aside in sorted(self._aside.values(), key=lambda aside: aside.not_before):
            if len(self._tasks) >= width or aside.not_before > now:
                return
            self._start(aside.turn)

    async def _claim(self, width: int) -> None:
        free = width - len(self._tasks)
        # The number of turns set aside is limited too; beyond it, a service that is down is probed
        # with those.
        free = min(free, 4 * self._config.concurrency - self._num_waiting())
        if free <= 0 or time.monotonic() < self._next_claim_at:
            return
        try:
            turns = await self._store.claim(
                self._stage.state, owner=self._owner, limit=free, ttl_s=self._config.claim_ttl_s
            )
        except StoreUnavailable as error:
            logger.warning("%s: cannot claim turns: %s", self._owner, error)
            turns = []
        for turn in turns:
            self._start(turn)
        if len(turns) == free:
            self._poll_s = self._config.poll_min_s
        else:
            self._poll_s = min(2 * self._poll_s, self._config.poll_max_s)
        self._next_claim_at = time.monotonic() + self._poll_s

    def _num_waiting(self) -> int:
        in_flight = {turn.turn_id for turn in self._tasks.values()}
        return sum(turn_id not in in_flight for turn_id in self._aside)

    def _start(self, turn: Item) -> None:
        if any(turn.turn_id == other.turn_id for other in self._tasks.values()):
            return  # our own claim had expired and came back to us: the first attempt still runs
        task = asyncio.create_task(self._attempt(turn), name=f"{self._owner}:{turn.turn_id}")
        self._tasks[task] = turn
        task.add_done_callback(lambda _: self._wake.set())

    async def _attempt(self, turn: Item) -> None:
        try:
            await self._stage.process(turn)
        except ServiceUnavailable as error:
            await self._failed(turn, error)
        except StoreUnavailable as error:
            # The result is lost, but not the turn: it is computed again when the store is back.
            await self._failed(turn, ServiceUnavailable(f"the store is unavailable: {error}"))
        except (StageStopped, StoreError) as error:
            error.add_note(f"while {self._owner} worked on turn {turn.turn_id}")
            raise
        except Exception as error:  # One odd turn must not stop all others: it is set aside.
            logger.exception("%s: unplanned error on turn %s", self._owner, turn.turn_id)
            await self._failed(turn, UnplannedError(f"{type(error).__name__}: {error}"))
        else:
            self._succeeded(turn)

    def _succeeded(self, turn: Item) -> None:
        if self._failures_in_a_row:
            logger.warning(
                "%s: answers again after %d failures in a row", self._owner, self._failures_in_a_row
            )
        self._aside.pop(turn.turn_id, None)
        self._num_successes += 1
        self._failures_in_a_row = 0
        self._paused_until = 0.0

    async def _failed(self, turn: Item, error: ServiceUnavailable) -> None:
        now = time.monotonic()
        self._pause(error, now)
        previous = self._aside.get(turn.turn_id)
        at_fault = previous is not None and self._num_successes > previous.successes_seen
        attempts = (previous.attempts if previous else 1) + at_fault
        first_failed_at = previous.first_failed_at if previous else now
        if (
            attempts >= self._config.max_attempts
            or now - first_failed_at >= self._config.give_up_after_s
        ):
            await self._give_up(turn, error)
            return
        self._aside[turn.turn_id] = _SetAside(
            turn=turn,
            error=error,
            first_failed_at=first_failed_at,
            attempts=attempts,
            successes_seen=self._num_successes,
            not_before=now + self._backoff_s(attempts),
        )

    def _pause(self, error: ServiceUnavailable, now: float) -> None:
        # Turns that failed together are one failure of the service, not 24.
        if now >= self._paused_until:
            self._failures_in_a_row += 1
            pause_s = max(self._backoff_s(self._failures_in_a_row), error.retry_after_s or 0.0)
            self._paused_until = now + pause_s
            logger.warning(
                "%s: unavailable (failure %d in a row), turns are kept, next attempt in %.1f s: %s",
                self._owner,
                self._failures_in_a_row,
                pause_s,
                error,
            )

    def _backoff_s(self, failures: int) -> float:
        return min(
            self._config.pause_min_s * 2.0 ** min(failures - 1, 30), self._config.pause_max_s
        )

    async def _give_up(self, turn: Item, error: ServiceUnavailable) -> None:
        logger.warning("%s: giving up turn %s: %s", self._owner, turn.turn_id, error)
        try:
            if isinstance(error, UnplannedError):
                reason = DropReason.INTERNAL_ERROR
                await self._store.drop(self._owner, turn.turn_id, reason, str(error))
            else:
                await self._stage.give_up(turn, error)
        except StoreUnavailable as store_error:
            logger.warning("%s: cannot drop turn %s: %s", self._owner, turn.turn_id, store_error)
        self._aside.pop(turn.turn_id, None)

    def _collect_finished(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            task.result()  # raises before the turn is forgotten: its claim must still be released
            del self._tasks[task]

    def _seconds_until_next_look(self) -> float:
        now = time.monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        width = 1 if self._failures_in_a_row else self._config.concurrency
        if len(self._tasks) >= width:
            return self._config.claim_ttl_s  # a finishing turn wakes the loop
        return max(self._next_claim_at - now, 0.0) or self._poll_s

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()

    async def _extend_claims(self) -> None:
        while True:
            await asyncio.sleep(self._config.claim_ttl_s / 3)
            turn_ids = self._held_ids()
            if not turn_ids:
                continue
            try:
                await self._store.extend_claims(self._owner, turn_ids, self._config.claim_ttl_s)
            except StoreUnavailable as error:
                logger.warning("%s: cannot extend claims: %s", self._owner, error)

    def _held_ids(self) -> list[str]:
        in_flight = [turn.turn_id for turn in self._tasks.values()]
        return list(dict.fromkeys([*in_flight, *self._aside]))

    async def _shut_down(self, *helpers: asyncio.Task[None]) -> None:
        held = self._held_ids()
        tasks = [*self._tasks, *helpers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if held:
            try:
                await self._store.release(self._owner, held)
            except StoreUnavailable as error:
                logger.warning("%s: claims are left to expire: %s", self._owner, error)
