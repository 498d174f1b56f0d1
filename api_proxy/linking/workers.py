"""Threads for the work of large requests, so that the event loop keeps running.

There are few of them, because each competes with the loop for the interpreter's lock. Their work is
bounded (`request_limits`), and work that is cancelled before it starts never runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_NUM_THREADS = 2


class Workers:
    """Runs functions: those of requests over `offload_bytes` in a thread."""

    def __init__(self, offload_bytes: int) -> None:
        self._offload_bytes = offload_bytes
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="request")

    async def run(
        self,
        num_bytes: int,
        function: Callable[Given, Result],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Result:
        """What `function` returns or raises for a request of `num_bytes`."""
        if num_bytes <= self._offload_bytes:
            return function(*args, **kwargs)
        future = self._threads.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
