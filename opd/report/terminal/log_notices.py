"""What a run's processes warn of, for the terminal of the command that started them.

Each warning is already a line of a log in RUN/logs, and is read from there: nobody looks into logs
while a terminal shows that all is well. Warnings of libraries stay in the logs.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    # The endpoint reads notices, too, and prints nothing: Rich would only cost it memory.
    from rich.console import Console

PROCESSES = ("proxy", "trainer", "judge", "engine_policy", "engine_frozen", "serve")
"""Further workers of the endpoint have logs of their own: proxy.2, ..."""
SAY_EVERY_S = 15.0
AGAIN_AFTER_S = 600.0
"""A kind that goes on is told again only after this long."""
_MOST_BYTES = 2**20
_MOST_KINDS = 5
_PACKAGES = "opd|trainer|judge|api_proxy|rollout_bridge|records"
_LINE = re.compile(
    rf"^(\d{{4}}-\d\d-\d\d [\d:]+),\d+ (?:WARNING|ERROR) (?:{_PACKAGES})\.[\w.]+: (.*)$"
)
_REQUEST = re.compile(r"^(?:\[worker \d+\] )?(?:\[req_\w+\] )?")
_DIFFERS = re.compile(r"\breq_\w+|\b(?:session|key) \S+|\d+(?:\.\d+)?")


@dataclass(slots=True)
class _Kind:
    """The newest text of a kind, and how many have come that were not told."""

    text: str = ""
    number: int = 0
    told_at: float = float("-inf")


class LogNotices:
    """Warnings that are new in the logs since this was created, or last asked."""

    def __init__(self, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}
        self._read_to = {name: self._size(name) for name in self._names()}
        self._since = ""

    @classmethod
    def since(cls, logs: Path, since: datetime) -> Self:
        """Warnings that were logged since then (local time), in the last megabyte of each log."""
        notices = cls(logs)
        notices._read_to = {}
        notices._since = since.strftime("%Y-%m-%d %H:%M:%S")
        return notices

    def new(self) -> list[str]:
        """A line for each kind, the newest of it, and how often it came: lines that differ only in
        numbers, sessions, keys or request ids are of one kind.
        """
        for name in self._names():
            for line in self._new_lines(name):
                found = _LINE.match(line)
                if found is None or found[1] < self._since:
                    continue
                text = f"{name.partition('.')[0]}: {_REQUEST.sub('', found[2])}"
                kind = self._kinds.setdefault(_DIFFERS.sub("#", text), _Kind())
                kind.text, kind.number = text, kind.number + 1
        now, said = self._clock(), []
        for kind in self._kinds.values():
            if kind.number and now - kind.told_at >= AGAIN_AFTER_S:
                times = "" if kind.number == 1 else f" ({kind.number} times)"
                said.append(kind.text + times)
                kind.number, kind.told_at = 0, now
        self._kinds = {
            name: kind for name, kind in self._kinds.items() if now - kind.told_at < AGAIN_AFTER_S
        }
        left = len(said) - _MOST_KINDS
        more = [f"and {left} other warnings: see {self._logs}"] if left > 0 else []
        return said[:_MOST_KINDS] + more

    def _names(self) -> list[str]:
        return [*PROCESSES, *sorted(path.stem for path in self._logs.glob("proxy.*.log"))]

    def _path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _size(self, name: str) -> int:
        path = self._path(name)
        return path.stat().st_size if path.exists() else 0

    def _new_lines(self, name: str) -> list[str]:
        size, begin = self._size(name), self._read_to.get(name, 0)
        if size <= begin:
            self._read_to[name] = size
            return []
        begin = max(begin, size - _MOST_BYTES)
        with self._path(name).open("rb") as file:
            file.seek(begin)
            part = file.read(size - begin)
        end = part.rfind(b"\n") + 1  # the rest is being written
        self._read_to[name] = begin + end
        return part[:end].decode(errors="replace").splitlines()


def say_notices(notices: LogNotices, console: Console) -> None:
    """Print what is new; what a process logs is not markup."""
    for notice in notices.new():
        console.print(notice, style="yellow", markup=False, highlight=False, soft_wrap=True)


@asynccontextmanager
async def notices_said(
    console: Console, logs: Path, every_s: float = SAY_EVERY_S
) -> AsyncGenerator[None]:
    """Print what the processes of a run warn of, as it comes, and what is left at the end."""
    notices = LogNotices(logs)

    async def look() -> None:
        while True:
            await asyncio.sleep(every_s)
            say_notices(notices, console)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        say_notices(notices, console)
