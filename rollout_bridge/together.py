"""Many small tasks at a time, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in this order. The first exception cancels what is left, and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """The results of two tasks of different types, like `all_or_none`."""
    found: list[Any] = await all_or_none([one, other])
    return found[0], found[1]
