"""Whether a server of the run answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp


def answers(url: str) -> Callable[[], Awaitable[bool]]:
    """Whether a GET of `url` gives 200."""

    async def ready() -> bool:
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return ready
