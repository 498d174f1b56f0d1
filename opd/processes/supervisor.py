"""Starts the processes of a run, keeps them alive, and stops them: its own children and nothing
else.

Each child gets a log file and a pipe as standard input that closes when this process dies, for
whatever reason; the child then stops itself (`watch_parent`). A child that ends while it is wanted
is restarted: every worker can be restarted at any point, because all that matters is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer.errors import StartupError

logger = logging.getLogger(__name__)

_SAID_CHARS = 500


class ChildFailed(StartupError):
    """A child could not be started, or ended too often; the message has its log's last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a child that the system keeps killing is restarted: until it was killed `most_kills`
    times while `progress` returned the same. `remedy` says what to do then.
    """

    progress: Callable[[], object]
    remedy: str
    most_kills: int = 3


@dataclass(slots=True, kw_only=True)
class Child:
    """One process of the run: how to start it and how to tell that it is ready."""

    name: str
    argv: list[str]
    ready: Callable[[], Awaitable[bool]]
    log: Path | None
    may_finish: bool = False
    environment: dict[str, str] | None = None
    patience: Patience | None = None
    files: tuple[int, ...] = ()
    kills: list[object] = field(default_factory=list)
    """What `patience.progress` returned at each kill since it last changed."""
    watcher: asyncio.Task[None] | None = None
    process: asyncio.subprocess.Process | None = None
    starts: list[float] = field(default_factory=list)

    @property
    def group(self) -> str:
        """What children have in common that are stopped together: the name up to a dot."""
        return self.name.partition(".")[0]


class Supervisor:
    """`start` children one by one, `stop` them all in reverse order; `failed` is set if one
    gives up. Children log to files in `logs`; without it, to this process's standard error.
    """

    def __init__(
        self, logs: Path | None, max_restarts_a_minute: int = 5, stop_timeout_s: float = 30.0
    ) -> None:
        self.logs = logs
        self._max_restarts = max_restarts_a_minute
        self._stop_timeout_s = stop_timeout_s
        self._children: list[Child] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(
        self,
        name: str,
        arguments: list[str],
        ready: Callable[[], Awaitable[bool]],
        timeout_s: float,
        *,
        may_finish: bool = False,
        environment: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        files: tuple[int, ...] = (),
    ) -> None:
        """Run `python ARGUMENTS` as a child and wait until `ready` says so; `environment` is added
        to this process's. It inherits the open `files` each time it is started; they are closed
        when it is stopped.

        A child that `may_finish` is not restarted after it ended with status 0. Raises ChildFailed
        when it ends or is not ready within `timeout_s` seconds.
        """
        argv = [sys.executable, *arguments, "--exit-with-parent"]
        child = Child(
            name=name,
            argv=argv,
            ready=ready,
            log=None if self.logs is None else self.logs / f"{name}.log",
            may_finish=may_finish,
            environment=None if environment is None else {**os.environ, **environment},
            patience=patience,
            files=files,
        )
        self._children.append(child)
        await self._spawn(child)
        await self._wait_ready(child, timeout_s)
        child.watcher = asyncio.create_task(self._watch(child))

    async def stop(self, *names: str) -> None:
        """Stop the named children or groups, or all: SIGTERM in reverse order, to those of a group
        at once, and SIGKILL after the timeout.
        """
        chosen = [
            child
            for child in self._children
            if not names or child.name in names or child.group in names
        ]
        for child in chosen:
            if child.watcher is not None:
                child.watcher.cancel()
                await asyncio.gather(child.watcher, return_exceptions=True)
        for group in dict.fromkeys(child.group for child in reversed(chosen)):
            await asyncio.gather(
                *(self._stop_child(child) for child in chosen if child.group == group)
            )
        kept = {file for child in self._children if child not in chosen for file in child.files}
        for file in {file for child in chosen for file in child.files} - kept:
            os.close(file)
        for child in chosen:
            child.files = ()

    def hurry(self) -> None:
        """Send SIGTERM to all children, again to those that are being stopped."""
        for child in self._children:
            _terminate(child)

    def has(self, name: str) -> bool:
        """Whether a child of this name was started."""
        return any(child.name == name for child in self._children)

    def has_finished(self, name: str) -> bool:
        """Whether a child of this name ended for good, with status 0."""
        return any(
            child.name == name
            and child.may_finish
            and child.process is not None
            and child.process.returncode == 0
            for child in self._children
        )

    async def _spawn(self, child: Child) -> None:
        with contextlib.ExitStack() as stack:
            log = None
            if child.log is not None:
                child.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                log = stack.enter_context(child.log.open("ab"))
            spawning = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *child.argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=child.environment,
                    # A Ctrl-C in the terminal reaches only this process, which then stops them in
                    # order.
                    start_new_session=True,
                    pass_fds=child.files,
                )
            )
            try:
                child.process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                child.process = await spawning  # there is a process now, and `stop` must know it
                raise
        child.starts.append(time.monotonic())

    async def _wait_ready(self, child: Child, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if child.process is None or child.process.returncode is not None:
                raise ChildFailed(
                    f"{child.name} ended while starting{_signal_of(child)}: {last_words(child.log)}"
                )
            if await child.ready():
                return
            await asyncio.sleep(0.1)
        raise ChildFailed(
            f"{child.name} was not ready after {timeout_s:.0f} s: {last_words(child.log)}"
        )

    async def _watch(self, child: Child) -> None:
        while True:
            assert child.process is not None
            status = await child.process.wait()
            if status == 0 and child.may_finish:
                return
            if _is_given_up(child):
                self._fail(_killed_too_often(child))
                return
            recent = [start for start in child.starts if time.monotonic() - start < 60]
            if len(recent) > self._max_restarts:
                often = f"{child.name} ended {len(recent)} times in a minute{_signal_of(child)}"
                self._fail(f"{often}: {last_words(child.log)}")
                return
            if _signal_of(child):
                logger.warning("%s ended%s; it is restarted", child.name, _signal_of(child))
            await self._spawn(child)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(ChildFailed(reason))

    async def _stop_child(self, child: Child) -> None:
        process = _terminate(child)
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), self._stop_timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _terminate(child: Child) -> asyncio.subprocess.Process | None:
    """The child's process, if it still runs; it is told to end."""
    process = child.process
    if process is None or process.returncode is not None:
        return None
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    return process


def _signal_of(child: Child) -> str:
    """Which signal ended it, as the end of a sentence; empty if none did."""
    status = None if child.process is None else child.process.returncode
    if status is None or status >= 0:
        return ""
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
        cause = ", probably out of memory: the system ended it" if name == "SIGKILL" else ""
        return f" by signal {name}{cause}"
    return f" by signal {-status}"


def _is_given_up(child: Child) -> bool:
    """Counts a kill; returns whether there were too many without progress."""
    patience, process = child.patience, child.process
    if patience is None or process is None or process.returncode != -signal.SIGKILL:
        return False
    now = patience.progress()
    child.kills = [*(kill for kill in child.kills if kill == now), now]
    return len(child.kills) >= patience.most_kills


def _killed_too_often(child: Child) -> str:
    assert child.patience is not None
    return (
        f"{child.name} was killed by the system {len(child.kills)} times without a training step "
        f"in between, probably for memory: {child.patience.remedy} (log: {child.log})"
    )


def watch_parent() -> None:
    """In a child: end this process cleanly when the parent is gone (standard input reaches its
    end).
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that are free now, according to the operating system."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in sockets]


def listen_problem(host: str, port: int) -> tuple[Literal["host", "port"], str] | None:
    """Which of the two prevents listening at `host`:`port` now, why, and what to do; None if
    neither does.
    """
    foreign = f"{host!r} is not an address of this machine: use 127.0.0.1, or one that it has"
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                # As a server binds: connections that ended a moment ago do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except socket.gaierror:
        return "host", foreign
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return "host", foreign
        reasons = {
            errno.EACCES: "is for the superuser: choose one above 1023",
            errno.EADDRINUSE: f"on {host} is in use: choose another, or stop what listens there",
        }
        return "port", f"{port} {reasons.get(error.errno or 0, error.strerror)}"
    return None


def last_words(log: Path | None) -> str:
    """The last line of a child's log, which says why it ended, and where the rest is."""
    if log is None:
        return "what it said is above"
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"no log at {log}"
    lines = [line for line in text.splitlines() if line.strip()]
    said = lines[-1].strip().removeprefix("error: ") if lines else "it said nothing"
    said = said if len(said) <= _SAID_CHARS else f"{said[:_SAID_CHARS]}..."
    return f"{said} (log: {log})"


def tail(path: Path, lines: int = 12) -> str:
    """The end of another program's log, as one block for an error message."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return f"no log at {path}"
    return f"the end of {path}:\n" + "\n".join(text.splitlines()[-lines:])
