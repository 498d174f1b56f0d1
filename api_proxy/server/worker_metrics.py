"""The metrics of one of several workers, in a file that all of them read: a scrape reaches any.

Each sample has a label that names its worker, so that a counter of one that is restarted begins
anew by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from api_proxy.server.other_metrics import replace_metrics
from api_proxy.sharing.sharing import process_name

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 5.0


class WorkerMetrics:
    """Writes what worker `number` counts in `registry` to a file in `folder`."""

    def __init__(self, registry: CollectorRegistry, folder: Path, number: int) -> None:
        self._labelled = _Labelled(registry, number)
        self._folder = folder
        self._name = process_name(number)
        self._writing = asyncio.Lock()

    async def write(self) -> None:
        """Write all samples as they are now. Raises OSError."""
        async with self._writing:
            text = generate_latest(self._labelled)
            await asyncio.to_thread(replace_metrics, self._folder, self._name, text)

    async def keep_written(self, stop: asyncio.Event) -> None:
        """Write them every few seconds until `stop`."""
        while not stop.is_set():
            try:
                await self.write()
            except OSError as error:
                logger.warning("metrics are not written: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _WRITE_EVERY_S)


def remove_of_others(folder: Path, workers: int) -> None:
    """Remove what earlier workers have left in `folder`, if there are fewer of them now; one alone
    writes nothing.
    """
    kept = {process_name(number) for number in range(1, workers + 1)} if workers > 1 else set()
    first = process_name(1)
    for path in (*folder.glob(f"{first}.prom"), *folder.glob(f"{first}.*.prom")):
        if path.stem not in kept:
            path.unlink(missing_ok=True)


class _Labelled(Collector):
    """The samples of a registry, each with the label `worker`."""

    def __init__(self, registry: CollectorRegistry, number: int) -> None:
        self._registry = registry
        self._number = str(number)

    def collect(self) -> Iterator[Metric]:
        """Called by `generate_latest`."""
        for family in self._registry.collect():
            family.samples = [
                one._replace(labels={**one.labels, "worker": self._number})
                for one in family.samples
            ]
            yield family
