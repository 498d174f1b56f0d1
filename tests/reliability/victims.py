"""The processes that die: started as `opd` starts them, killed, and asked what they held.

What a dead process held is read afterwards from the database, where its claims and leases still
bear its process id, and from the agents' side, whose requests it left without an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from api_proxy.sharing.sharing import process_name
from opd.processes.roles.proxy_workers import Worker
from opd.processes.supervisor import tail
from records.hints.rows import HintRow
from records.lessons.rows import LessonRow
from records.store import Store
from records.tables.models import TurnRow
from tests.reliability.client_log import ClientLog
from tests.reliability.forked import Forked, ForkServer
from tests.reliability.kill_plan import Kill

COMMANDS = {"proxy": "proxy", "judge": "judge", "trainer": "train"}
LONGEST_RANDOM_S = 1.5
_POLL_S = 0.025


class EndedByItself(AssertionError):
    """A process ended though nobody killed it: that is a finding."""


async def first_of(
    wanted: Coroutine[Any, Any, Any],
    other: Coroutine[Any, Any, Any],
    timeout_s: float | None = None,
) -> bool:
    """Run both until one ends, or the time is up; whether `wanted` has. Raises what that did."""
    tasks = [asyncio.create_task(wanted), asyncio.create_task(other)]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        has_ended = tasks[0].done()
        if has_ended:
            tasks[0].result()
        return has_ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Victim:
    """One process of the run, through all its lives."""

    def __init__(
        self,
        name: str,
        config_file: Path,
        *,
        server: ForkServer,
        store: Store,
        log: ClientLog,
        rng: random.Random,
        worker: Worker | None = None,
    ) -> None:
        self.name = name
        self._arguments = [] if worker is None else ["--worker", str(worker)]
        self._server = server
        self._config_file = config_file
        self._store = store
        self._log = log
        self._rng = rng
        log_name = name if worker is None else process_name(worker.number)
        self._output = config_file.parent / "logs" / f"{log_name}.log"
        self._process: Forked | None = None
        self._broken_before = 0
        self._acknowledged_before = 0

    async def start(self, dies_at: tuple[str, int] | None = None) -> None:
        """Begin a life; with `dies_at` it ends at that place's visit of that number."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        arguments = [COMMANDS[self.name], "--config", str(self._config_file), "--exit-with-parent"]
        arguments += self._arguments
        self._broken_before = self._log.num_broken
        self._acknowledged_before = len(self._log.acknowledged)
        fail_point = f"{dies_at[0]}:{dies_at[1]}" if dies_at is not None else None
        self._process = await self._server.start(arguments, self._output, fail_point)

    async def killed(
        self, dies_at: tuple[str, int] | None, patience_s: float, enough: asyncio.Event
    ) -> Kill | None:
        """Wait for the end of a life at `dies_at`, or kill it at a random instant: if None is
        given, or after `patience_s` in which the place was not reached.

        None if there were `enough` kills before it ended: then it goes on living.
        """
        assert self._process is not None
        point = dies_at[0] if dies_at else None
        if point is not None:
            await first_of(self._process.wait(), enough.wait(), timeout_s=patience_s)
        if self._process.returncode is None:
            point = None
            if not await first_of(self._kill_at_work(patience_s), enough.wait()):
                return None
        status = await self._process.wait()
        if status != -signal.SIGKILL:
            raise EndedByItself(f"{self.name} ended with status {status}; {tail(self._output, 30)}")
        return Kill(process=self.name, point=point, counted=await self._was_at_work(point))

    async def live_on(self) -> None:
        """Begin a last life, which nobody ends; one under way may have a place to die at."""
        if self._process is not None:
            self.end_now()
            await self._process.wait()
        await self.start()

    async def stop(self) -> None:
        """End the last life in order."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 60)
        except TimeoutError:
            self.end_now()
            raise EndedByItself(f"{self.name} does not stop; {tail(self._output, 30)}") from None

    def end_now(self) -> None:
        """End the last life, whatever it is doing; nothing if it ended."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def check_alive(self) -> None:
        """Raises EndedByItself if it is not."""
        assert self._process is not None
        if self._process.returncode is not None:
            status = self._process.returncode
            raise EndedByItself(f"{self.name} ended with status {status}; {tail(self._output, 30)}")

    async def _kill_at_work(self, patience_s: float) -> None:
        """Wait until it has something to lose, a random while, and until it has so again."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._at_work()
                await asyncio.sleep(self._rng.uniform(0.0, LONGEST_RANDOM_S))
                await self._at_work()
        self._process.send_signal(signal.SIGKILL)

    async def _at_work(self) -> None:
        while not await self._has_work():
            await asyncio.sleep(_POLL_S)

    async def _has_work(self) -> bool:
        if self.name == "proxy":
            has_begun = len(self._log.acknowledged) > self._acknowledged_before
            return has_begun and self._log.num_open > 0
        return await self._num_held() > 0

    async def _was_at_work(self, point: str | None) -> bool:
        """Whether a row was claimed, leased or uncommitted when it died."""
        if self.name == "proxy":
            # The connections of a dead process end at once, but the agents have to read that, and
            # all of it before the next life begins.
            await asyncio.sleep(0.5)
            return self._log.num_broken > self._broken_before
        # The trainer leases what it found to be ready. All other operations are on rows that the
        # process holds, or (a claim) may be on none.
        return point == "lease.uncommitted" or await self._num_held() > 0

    async def _num_held(self) -> int:
        """Rows that this life of the process holds."""
        assert self._process is not None
        mine = f"%:{self._process.pid}"

        def query(connection: Connection) -> int:
            return sum(
                connection.scalar(select(func.count()).where(row.claim_owner.like(mine))) or 0
                for row in (TurnRow, LessonRow, HintRow)
            )

        return await self._store.read(query)
