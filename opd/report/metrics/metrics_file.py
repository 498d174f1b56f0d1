"""RUN/metrics/NAME.prom: what a process counts, for the endpoint's `/metrics` to show.

Rewritten every few seconds, whole or not at all: whoever scrapes the endpoint also gets the figures
of the processes behind it, and a process that dies leaves its last figures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from api_proxy.server.other_metrics import replace_metrics
from opd.report.metrics.run_figures import RunCollector
from opd.report.terminal.at_work import every
from records.errors import StoreUnavailable

logger = logging.getLogger(__name__)

FOLDER = "metrics"
WRITE_EVERY_S = 5.0


def write_metrics(folder: Path, name: str, registries: Sequence[CollectorRegistry]) -> None:
    """Write the file `name` of a run's `folder`."""
    text = b"".join(generate_latest(one) for one in registries)
    replace_metrics(folder / FOLDER, name, text)


@contextmanager
def writing_metrics(
    folder: Path, name: str, registries: Sequence[CollectorRegistry]
) -> Iterator[None]:
    """Write them every few seconds, from a separate thread, because a trainer blocks its loop for a
    whole step.
    """

    def write() -> None:
        try:
            write_metrics(folder, name, registries)
        except OSError as error:
            logger.warning("metrics are not written: %s", error)

    write()
    try:
        with every(WRITE_EVERY_S, write):
            yield
    finally:
        write()


async def keep_written(
    folder: Path,
    name: str,
    registries: Sequence[CollectorRegistry],
    run: RunCollector,
    stop: asyncio.Event,
) -> None:
    """Write them, and the figures of the run, until `stop`. It never fails: figures are no reason
    to end a process.
    """
    of_run = CollectorRegistry()
    of_run.register(run)
    while not stop.is_set():
        try:
            await run.refresh()
            await asyncio.to_thread(write_metrics, folder, name, [*registries, of_run])
        except (OSError, StoreUnavailable) as error:
            logger.warning("metrics are not written: %s", error)
        try:
            await asyncio.wait_for(stop.wait(), WRITE_EVERY_S)
        except TimeoutError:
            continue
