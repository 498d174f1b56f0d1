"""A line per minute from work that prints nothing else, so that nobody thinks it has died."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 60.0
"""How often long work reports that it goes on, if there is no progress bar."""


@contextmanager
def at_work(what: str, line_every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Print on standard error, once in a while, that the block goes on and for how long so far."""
    started = time.monotonic()

    def say() -> None:
        print(f"{what}: at work for {_minutes(time.monotonic() - started)}", file=sys.stderr)

    with every(line_every_s, say):
        yield


@contextmanager
def every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` repeatedly, in its own thread, until the block ends."""
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
