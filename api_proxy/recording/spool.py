"""What the store does not take goes to a spill file, and from there to the store, in order.

While anything waits here, everything that is recorded goes the same way, and requests are answered
without asking the store where they belong: the earlier turn that they continue may itself be
waiting. They are linked when they are taken in, after what came before them. Files of dead
processes are taken in by the next process.

All of that holds across the workers of an endpoint, because a conversation may reach any of them:
each has a file of its own, spills while any of them has something that waits, and takes in nothing
while another's oldest record is older.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from api_proxy.linking.lineage import LineageFinder
from api_proxy.linking.sessions import Sessions
from api_proxy.metrics import ProxyMetrics
from api_proxy.recording.capture import of_linked
from api_proxy.sharing.sharing import Sharing
from records.database import fail_points
from records.errors import StoreError, StoreUnavailable
from records.names import DropReason, TurnType
from records.spill.spill import SpillFile, SpillRecord, orphans
from records.spill.spilled import Addition, decode, encode, redacted
from records.store import Store

logger = logging.getLogger(__name__)

_ORPHANS_EVERY = 20
"""Rounds between two looks for the files of dead processes."""


class Spool:
    """The spill file of one application. `start` before the first request, `close` after the last.

    `retry_s` is the pause between two attempts to empty it.
    """

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        lineage: LineageFinder,
        metrics: ProxyMetrics,
        retry_s: float,
        sharing: Sharing,
    ) -> None:
        self._store = store
        self._sharing = sharing
        self._sessions = sessions
        self._lineage = lineage
        self._metrics = metrics
        self._retry_s = retry_s
        self._folder: Path = store.config.spill_path
        self._file: SpillFile | None = None
        self._orphans: list[SpillFile] = []
        self._taken = 0
        """Bytes of the own file that are already in the store."""
        self._writing = asyncio.Lock()
        self._adding: set[asyncio.Task[bool]] = set()
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[float] = deque()
        """When the records of the own file were made that the store lacks, in their order."""
        metrics.spill_waiting.set_function(lambda: len(self._waiting) + len(self._orphans))

    @property
    def is_waiting(self) -> bool:
        """Whether the store lacks something that was recorded before, here or by another worker."""
        return self._waits_here or self._sharing.waiting_elsewhere() is not None

    @property
    def _waits_here(self) -> bool:
        return bool(self._waiting or self._orphans)

    async def start(self) -> None:
        """Reserve the file and look for those of dead processes. Raises StoreUnavailable."""
        reserve = self._store.config.spill_reserve_bytes
        self._file = await asyncio.to_thread(SpillFile.create, self._folder, reserve)
        self._orphans = await asyncio.to_thread(orphans, self._folder, self._file.path)
        await self._tell_oldest_orphan()
        await self._settle()
        self._task = asyncio.create_task(self._keep_settling(), name="spool")

    async def close(self) -> None:
        """Try once more to empty the file; what is left is for the next process."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._settle()
        for orphan in self._orphans:
            orphan.close()
        if self._file is None:
            return
        if self._waiting:
            logger.error("%d records wait for the store in %s", len(self._waiting), self._folder)
            self._file.close()
        else:
            self._file.remove()
        self._file = None

    async def add(self, addition: Addition) -> bool:
        """Keep an addition, synced on return; logs and returns False if that fails too."""
        # In a task of its own: a caller that is cancelled leaves no half record.
        adding = asyncio.create_task(self._add(addition))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        return await asyncio.shield(adding)

    async def _add(self, addition: Addition) -> bool:
        try:
            payload = await self._store.redact(self._encoded, addition)
            async with self._writing:
                if self._file is None:
                    raise OSError("the spill file is closed")
                await self._append(self._file, addition.created_at, payload)
                fail_points.reach("spill.appended")
        except (OSError, ValueError, RecursionError, StoreUnavailable) as error:
            logger.error(
                "a %s is lost because it was not spilled: %s", addition.what, _brief(error)
            )
            return False
        self._metrics.spilled.labels(addition.what).inc()
        logger.error(
            "the store does not take a %s: kept in %s, %d records wait",
            addition.what,
            self._folder,
            len(self._waiting),
        )
        return True

    async def _append(self, file: SpillFile, at: float, payload: bytes) -> None:
        # Known before it can be read back, which may happen before this goes on.
        self._waiting.append(at)
        try:
            await asyncio.to_thread(file.append, at, payload)
        except OSError:
            self._waiting.pop()
            raise
        finally:
            if not self._orphans:
                self._tell_oldest()

    def _encoded(self, addition: Addition) -> bytes:
        return encode(redacted(addition, self._store.redactor))

    async def _keep_settling(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._retry_s)
            number += 1
            if number % _ORPHANS_EVERY == 0 and self._file is not None:
                known = {orphan.path for orphan in self._orphans}
                found = await asyncio.to_thread(orphans, self._folder, self._file.path)
                self._orphans += [orphan for orphan in found if orphan.path not in known]
                await self._tell_oldest_orphan()
            if self._waits_here:
                await self._settle()

    async def _settle(self) -> None:
        """Take in what waits, oldest first, until the store refuses."""
        try:
            await self._settle_orphans()
            await self._settle_own()
        except StoreUnavailable as error:
            logger.warning("%d records still wait: %s", len(self._waiting), error)
        except OSError as error:
            logger.error("the spill file cannot be read: %s", _brief(error))

    async def _settle_orphans(self) -> None:
        if not self._orphans:
            return
        # Files of several processes: their records in the order in which they were written.
        for record, orphan in heapq.merge(
            *(
                zip(orphan.read(), itertools.repeat(orphan), strict=False)
                for orphan in self._orphans
            ),
            key=lambda pair: pair[0].at,
        ):
            self._sharing.set_waiting_since(record.at)
            await self._take_in(record, orphan)
        for orphan in self._orphans:
            self._count_damage(orphan)
            await asyncio.to_thread(orphan.remove)
        self._orphans = []
        self._tell_oldest()

    async def _tell_oldest_orphan(self) -> None:
        """As `_tell_oldest`, of what comes first as long as any orphan waits."""
        if not self._orphans:
            self._tell_oldest()
            return
        heads = await asyncio.to_thread(_first_times, self._orphans)
        if heads:
            self._sharing.set_waiting_since(min(heads))

    def _tell_oldest(self) -> None:
        """Tell the other workers when the oldest record of the own file was made."""
        self._sharing.set_waiting_since(self._waiting[0] if self._waiting else None)

    async def _settle_own(self) -> None:
        file = self._file
        while file is not None and self._taken < file.end:
            end = file.end
            for record in file.read(self._taken, end):
                await self._take_in(record, file)
                self._taken = record.end
                self._waiting.popleft()
                self._tell_oldest()
            self._taken = end
            async with self._writing:
                if self._taken == file.end:
                    file = await self._begin_anew(file)
                    logger.warning("all records that waited are in the store")

    async def _begin_anew(self, file: SpillFile) -> SpillFile:
        """The own file emptied, or a new one if it contains what cannot be taken in."""
        fresh = file
        if file.is_spent:
            await asyncio.to_thread(file.clear)
        else:
            reserve = self._store.config.spill_reserve_bytes
            fresh = await asyncio.to_thread(SpillFile.create, self._folder, reserve)
            await asyncio.to_thread(file.remove)
        self._count_damage(file)
        self._file = fresh
        self._taken = 0
        self._waiting.clear()
        self._tell_oldest()
        return fresh

    async def _take_in(self, record: SpillRecord, file: SpillFile) -> None:
        """Raises StoreUnavailable; what will never be taken in is logged, and its file kept."""
        elsewhere = self._sharing.waiting_elsewhere()
        if elsewhere is not None and elsewhere < record.at:
            raise StoreUnavailable("older ones of another worker come first")
        try:
            addition = decode(record.payload)
            await self.store_addition(addition)
        except StoreUnavailable:
            raise
        except Exception as error:  # One odd record must not keep back all that follow it.
            file.refuse(record)
            logger.error("a spilled record is refused: %s", _brief(error))
        else:
            self._metrics.taken_in.inc()

    async def store_addition(self, addition: Addition) -> None:
        """Write an addition to the store, linked first if that was deferred."""
        answered = None
        try:
            if addition.is_deferred:
                addition, answered = await self._linked(addition)
            is_new = await self._store.take_in(addition)
        except BaseException:
            if answered is not None:
                self._lineage.forget(answered)
            raise
        if is_new and addition.turn is not None:
            self._metrics.recorded(addition.turn.drop_reason)

    async def _linked(self, addition: Addition) -> tuple[Addition, str | None]:
        """The addition with its session, parent and next state, and the turn that it answers."""
        turn = addition.turn
        assert turn is not None, "only a turn's own lineage can be deferred"
        if await self._store.has_turn(turn.turn_id):
            return addition, None  # it was taken in before, by a process that then died
        session_id = None
        if addition.session_name is not None:
            session_id = await self._sessions.named(addition.scope, addition.session_name)
        is_side = turn.turn_type is TurnType.SIDE
        may_answer = not is_side and turn.drop_reason is not DropReason.RECORD_ONLY
        lineage = await self._lineage.find(
            scope=addition.scope,
            messages=turn.messages,
            session_id=session_id,
            now=addition.created_at,
            parent_turn_id=addition.continues,
            path=turn.identity.node_ids[:-1] if turn.identity else None,
            has_next_state=may_answer,
        )
        link = lineage.link
        reason = of_linked(turn.drop_reason, is_ambiguous=link.ambiguous)
        parent_id = link.parent.turn_id if link.parent else None
        turn = replace(
            turn,
            session_id=lineage.session_id or turn.session_id,
            parent_turn_id=parent_id,
            drop_reason=reason,
        )
        next_state = link.next_state if may_answer else ()
        answers = parent_id if next_state else None
        linked = replace(
            addition,
            turn=turn,
            answers=answers,
            next_state=next_state,
            echo_changes=link.echo_changes if answers else (),
        )
        return linked, answers

    def _count_damage(self, file: SpillFile) -> None:
        self._metrics.failed_turns.inc(file.num_damaged)
        self._metrics.spill_refused.inc(file.num_refused)
        if file.is_torn:
            self._metrics.spill_torn.inc()
            logger.warning("%s ends in a record that was never acknowledged", file.path.name)


def _first_times(files: Sequence[SpillFile]) -> list[float]:
    return [record.at for file in files for record in itertools.islice(file.read(), 1)]


def _brief(error: BaseException) -> str:
    """An error without what it may quote from a request."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, StoreError) else type(error).__name__
