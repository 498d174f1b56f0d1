"""A command that a launch runs next to its own Python processes: Ray, and slime's job.

Unlike the children of `opd.processes.supervisor` it is never restarted: a Ray that died has lost
its job. It runs under `hold.py`, so that it ends with the launch, however the launch ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from opd.cluster.flag_check import REPOSITORY
from opd.processes.supervisor import tail
from trainer.errors import StartupError

STOP_TIMEOUT_S = 75.0
"""Longer than `hold` waits before it kills the command."""


class LaunchError(StartupError):
    """The launch cannot continue; what it had started is stopped."""


class HeldFailed(StartupError):
    """A command ended that must not end; the message contains the end of its log."""


class Held:
    """One command with a log file."""

    def __init__(self, name: str, command: list[str], log: Path):
        self.name = name
        self.log = log
        self._command = [sys.executable, "-m", "opd.cluster.launching.hold", "--", *command]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; its output is appended to the log."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )

    async def wait(self) -> int:
        """Its exit status."""
        assert self._process is not None
        return await self._process.wait()

    @property
    def status(self) -> int | None:
        """Exit status, or None while it runs."""
        return None if self._process is None else self._process.returncode

    async def stop(self) -> None:
        """End it, and what it started."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def failure(self, what: str) -> HeldFailed:
        """An error with the end of the log."""
        return HeldFailed(f"{self.name} {what}; {tail(self.log, 20)}")


async def run_to_end(command: list[str], timeout_s: float) -> tuple[int, str]:
    """(exit status, standard output) of a short command; status 124 if it took too long."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 124, ""
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")
