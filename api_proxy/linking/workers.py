"""Threads for what a large request costs, so that the event loop goes on meanwhile.

There are few of them: each takes turns with the loop at the interpreter's lock. What they are given
is bounded (`request_limits`), and what was given up before it began does not begin.
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
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
