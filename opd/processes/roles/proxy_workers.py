"""The endpoint as children of a supervisor: one process, or `proxy.workers` of them on one port.

Workers inherit the listening socket, so a connection that waits to be accepted outlives any of
them, and nothing is refused while one is started again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from api_proxy.config import ProxyConfig
from api_proxy.server.listening import listening_sockets
from api_proxy.sharing.sharing import Sharing, process_name
from opd.processes.answering import answers
from opd.processes.supervisor import Supervisor
from trainer.errors import ConfigError, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Which of the workers a process is, and the descriptors that it has inherited."""

    number: int
    memory: int
    sockets: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Worker:
        """From the command line of a worker. Raises ConfigError."""
        try:
            number, memory, *sockets = (int(word) for word in text.split(","))
        except ValueError:
            raise ConfigError(f"--worker {text}: only `opd` itself starts workers") from None
        return cls(number=number, memory=memory, sockets=tuple(sockets))

    def __str__(self) -> str:
        return ",".join(str(one) for one in (self.number, self.memory, *self.sockets))


async def start_endpoint(
    supervisor: Supervisor, proxy: ProxyConfig, arguments: Sequence[str], timeout_s: float
) -> None:
    """Start the endpoint, and wait until all of it answers. `arguments` are those of `opd proxy`.

    Raises StartupError if nothing can listen there, and ChildFailed like `Supervisor.start`.
    """
    if proxy.workers == 1:
        ready = answers(f"http://{proxy.host}:{proxy.port}/healthz")
        await supervisor.start(process_name(1), [*arguments], ready, timeout_s)
        return
    sharing, workers = open_workers(proxy)
    await asyncio.gather(
        *(_start_worker(supervisor, one, sharing, arguments, timeout_s) for one in workers)
    )


def open_workers(proxy: ProxyConfig) -> tuple[Sharing, list[Worker]]:
    """What the workers of an endpoint share and inherit. Raises StartupError if nothing can listen
    there.
    """
    sharing = Sharing.create(proxy.workers)
    try:
        sockets = tuple(one.detach() for one in listening_sockets(proxy.host, proxy.port))
    except OSError as error:
        raise StartupError(f"proxy.port: {proxy.host}:{proxy.port}: {error.strerror}") from None
    return sharing, [
        Worker(number=number, memory=sharing.descriptor, sockets=sockets)
        for number in range(1, proxy.workers + 1)
    ]


async def _start_worker(
    supervisor: Supervisor,
    worker: Worker,
    sharing: Sharing,
    arguments: Sequence[str],
    timeout_s: float,
) -> None:
    async def ready() -> bool:
        return sharing.answers(worker.number)

    await supervisor.start(
        process_name(worker.number),
        [*arguments, "--worker", str(worker)],
        ready,
        timeout_s,
        files=(worker.memory, *worker.sockets),
    )


def workers_warnings(proxy: ProxyConfig) -> list[str]:
    """A line for more workers than can run at a time."""
    cores = len(os.sched_getaffinity(0))
    if proxy.workers <= cores:
        return []
    return [
        f"proxy.workers = {proxy.workers}, and this machine has "
        f"{cores} {'core' if cores == 1 else 'cores'}: more workers than cores only cost memory"
    ]
