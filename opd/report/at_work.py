"""A line a minute from work that shows nothing of itself, so that nobody takes it for dead."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 60.0
"""How often long work says that it goes on, wherever no bar is drawn."""


@contextmanager
def at_work(what: str, line_every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Say on standard error, once in a while, that the block goes on and for how long it has."""
    started = time.monotonic()

    def say() -> None:
        print(f"{what}: at work for {_minutes(time.monotonic() - started)}", file=sys.stderr)

    with every(line_every_s, say):
        yield


@contextmanager
def every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in a thread of its own, again and again, until the block ends."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(seconds):
            action()

    thread = threading.Thread(target=work, name="line-a-minute", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
