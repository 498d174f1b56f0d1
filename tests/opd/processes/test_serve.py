"""Stopping `opd serve`: at once, whatever it is doing, and only after it has cleaned up."""

from __future__ import annotations

import asyncio

import pytest

from opd.processes.serving import until_stopped
from trainer.errors import StartupError


async def test_a_stop_does_not_wait_for_a_start_that_takes_long() -> None:
    stop, cleaned = asyncio.Event(), []

    async def start() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    asyncio.get_running_loop().call_later(0.01, stop.set)
    async with asyncio.timeout(5):
        await until_stopped(stop, start())
    assert cleaned == [True]


async def test_what_fails_is_raised() -> None:
    async def fail() -> None:
        raise StartupError("no engine")

    with pytest.raises(StartupError, match="no engine"):
        await until_stopped(asyncio.Event(), fail())
