"""The processes that die: started as `opd` starts them, killed, and asked what they held.

What a dead process held is read afterwards from the database, where its claims and leases still
bear its process id, and from the agents' side, whose requests it left without an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

from sqlalchemy import Connection, func, select

from records.fail_points import VARIABLE
from records.models import TurnRow
from records.store import Store
from records.types import TurnState
from tests.reliability.client_log import ClientLog
from tests.reliability.kill_plan import Kill
from trainer.supervisor import tail

COMMANDS = {"proxy": "proxy", "judge": "judge", "trainer": "train"}
LONGEST_RANDOM_S = 3.0
_POLL_S = 0.05


class EndedByItself(AssertionError):
    """A process ended though nobody killed it: that is a finding."""


class Victim:
    """One process of the run, through all its lives."""

    def __init__(
        self, name: str, config_file: Path, store: Store, log: ClientLog, rng: random.Random
    ) -> None:
        self.name = name
        self._config_file = config_file
        self._store = store
        self._log = log
        self._rng = rng
        self._output = config_file.parent / "logs" / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._broken_before = 0
        self._acknowledged_before = 0

    async def start(self, dies_at: tuple[str, int] | None = None) -> None:
        """Begin a life; with `dies_at` it ends at that place's visit of that number."""
        environment = dict(os.environ)
        if dies_at is not None:
            environment[VARIABLE] = f"{dies_at[0]}:{dies_at[1]}"
        self._output.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["-m", "trainer.cli", COMMANDS[self.name]]
        arguments += ["--config", str(self._config_file), "--exit-with-parent"]
        self._broken_before = self._log.num_broken
        self._acknowledged_before = len(self._log.acknowledged)
        with self._output.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    async def killed(self, dies_at: tuple[str, int] | None, patience_s: float) -> Kill:
        """Wait for the end of a life at `dies_at`, or kill it at a random instant: if None is
        given, or after `patience_s` in which the place was not reached.
        """
        assert self._process is not None
        point = dies_at[0] if dies_at else None
        if point is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience_s)
        if self._process.returncode is None:
            point = None
            await self._kill_at_work(patience_s)
        status = await self._process.wait()
        if status != -signal.SIGKILL:
            raise EndedByItself(f"{self.name} ended with status {status}; {tail(self._output, 30)}")
        return Kill(process=self.name, point=point, counted=await self._was_at_work(point))

    async def stop(self) -> None:
        """End the last life in order."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 60)
        except TimeoutError:
            self._process.kill()
            raise EndedByItself(f"{self.name} does not stop; {tail(self._output, 30)}") from None

    def end_now(self) -> None:
        """End the last life, whatever it is doing; nothing if it ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def check_alive(self) -> None:
        """Raises EndedByItself if it is not."""
        assert self._process is not None
        if self._process.returncode is not None:
            status = self._process.returncode
            raise EndedByItself(f"{self.name} ended with status {status}; {tail(self._output, 30)}")

    async def _kill_at_work(self, patience_s: float) -> None:
        """Wait until it has something to lose, then a random while longer."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not await self._has_work():
                    await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self._rng.uniform(0.0, LONGEST_RANDOM_S))
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _has_work(self) -> bool:
        if self.name == "proxy":
            has_begun = len(self._log.acknowledged) > self._acknowledged_before
            return has_begun and self._log.num_open > 0
        return await self._num_held() > 0

    async def _was_at_work(self, point: str | None) -> bool:
        """Whether a row was claimed, leased or uncommitted when it died."""
        if self.name == "proxy":
            # The connections of a dead process end at once, but the agents have to read that.
            await asyncio.sleep(0.5)
            return self._log.num_broken > self._broken_before
        is_open = point is not None and point.endswith(".uncommitted") and "reconcile" not in point
        return is_open or await self._num_held() > 0

    async def _num_held(self) -> int:
        """Rows that this life of the process holds; of the trainer, which is one at a time, all
        that are leased.
        """
        assert self._process is not None
        pid = self._process.pid

        def query(connection: Connection) -> int:
            mine = TurnRow.claim_owner.like(f"%:{pid}")
            if self.name == "trainer":
                mine = TurnRow.state == TurnState.LEASED
            return connection.scalar(select(func.count()).where(mine)) or 0

        return await self._store._read(query)
