"""The other end of `fork_server`: processes that can be waited for and killed like one's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

START_S = 120.0


class Forked:
    """A process that the fork server started. `returncode` is None while it lives."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Its exit status; that of a signal is negative."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, status: int) -> None:
        """It was reaped with this status."""
        self.returncode = status
        self._ended.set()


class ForkServer:
    """An async context manager; all processes that it started end with it. They inherit `files`."""

    def __init__(self, files: Sequence[int] = ()) -> None:
        self._files = files
        self._children: dict[int, Forked] = {}
        self._started: asyncio.Queue[Forked] = asyncio.Queue()
        self._starting = asyncio.Lock()
        self._ready = asyncio.Event()

    async def __aenter__(self) -> ForkServer:
        self._server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.reliability.fork_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._files,
            # A Ctrl-C in the terminal is for the test, which ends in order.
            start_new_session=True,
        )
        self._listening = asyncio.create_task(self._listen())
        await asyncio.wait_for(self._ready.wait(), START_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        await self._server.wait()
        await self._listening

    async def start(self, arguments: list[str], log: Path, fail_point: str | None = None) -> Forked:
        """Run `opd ARGUMENTS` with its output appended to `log`; see
        records/database/fail_points.py.
        """
        request = {"arguments": arguments, "log": str(log), "fail_point": fail_point}
        assert self._server.stdin is not None
        async with self._starting:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            return await asyncio.wait_for(self._started.get(), START_S)

    async def _listen(self) -> None:
        assert self._server.stdout is not None
        async for line in self._server.stdout:
            what, *numbers = line.decode().split()
            if what == "ready":
                self._ready.set()
            elif what == "started":
                child = Forked(int(numbers[0]))
                self._children[child.pid] = child
                self._started.put_nowait(child)
            else:
                self._children.pop(int(numbers[0])).end(int(numbers[1]))
