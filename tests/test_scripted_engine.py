"""The benchmarks' engine without a model: clients that leave are everyday, and print nothing."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest
from aiohttp import web

from benchmarks.scripted_engine import Script, ScriptedEngine

SCRIPT = Script(reply_ids=(1,) * 200, first_s=0.0, pace_s=0.01)


async def test_a_client_that_leaves_its_stream_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = web.AppRunner(ScriptedEngine(SCRIPT).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
    try:
        async with aiohttp.ClientSession() as http:
            for _ in range(3):
                response = await http.post(url, json={"input_ids": [1], "stream": True})
                assert (await response.content.readline()).startswith(b"data: ")
                response.close()
        await asyncio.sleep(0.5)
    finally:
        await runner.cleanup()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
