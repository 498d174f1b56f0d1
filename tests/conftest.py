"""Settings of all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import tests.shared_statements  # noqa: F401
from tests.contract.engine_process import embedded_engine
from tests.examples.shipped import MODEL

if TYPE_CHECKING:
    from rollout_bridge.rendering.rendering import Rendering

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A script's background job ignores Ctrl-C, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = ("reliability", "integration", "contract", "hints", "step", "examples", "evaluation", "care")
"""Folders whose files take longest, the slowest first: so no core is left with one at the end."""
MARKS = {"long", "learning", "alone"}
WHOLE_RUNS = ("reliability", "integration", "step")
"""`./run.sh test` leaves out tests with these `MARKS`. Other commands look for them here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONG` first, and among whole runs the attacks last, which are many and short; each
    file's tests as they stand.

    Raises UsageError for a test that nothing in run.sh runs.
    """
    lost = [item.nodeid for item in items if _is_lost(item)]
    if lost:
        raise pytest.UsageError(f"run.sh looks for tests with these marks elsewhere: {lost}")
    places = {folder: place for place, folder in enumerate(LONG)}

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = places.get(item.path.parent.name, len(LONG))
        return folder, item.path.name.startswith("test_attacks_")

    items.sort(key=place)


def _is_lost(item: pytest.Item) -> bool:
    marked = {mark.name for mark in item.iter_markers()}
    return bool(marked & MARKS) and item.path.parent.name not in WHOLE_RUNS


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What importing makes lives as long as the process: no garbage collection need look at it,
    neither now nor later.
    """
    gc.disable()
    try:
        collected = yield
        gc.collect()
        gc.freeze()
        return collected
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def lab_engine() -> Iterator[str]:
    """The address of an engine with the lab's model as version 0, which it must be left with."""
    with embedded_engine(MODEL, "--seed", "0") as url:
        yield url


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A PostgreSQL database, which each test must leave `empty` and with its settings."""
    from tests.records.conftest import quick_database

    with quick_database() as url:
        yield url


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    """The lab's model's; folders with models of their own have theirs."""
    from rollout_bridge.config import RendererConfig
    from rollout_bridge.rendering.rendering import Rendering

    return Rendering.load(str(MODEL), RendererConfig(name="qwen3", enable_thinking=False))
