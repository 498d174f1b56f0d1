"""A scripted judge behind an OpenAI-compatible endpoint, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web

NAME = "scripted"


class Judge(Protocol):
    """Answers one prompt of the judge; raises ValueError for any other prompt."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> str: ...


@asynccontextmanager
async def judging(judge: Judge) -> AsyncIterator[str]:
    """Serve it until the body ends; yields the base URL."""

    async def complete(request: web.Request) -> web.Response:
        try:
            text = judge.answer((await request.json())["messages"])
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "vote", "object": "chat.completion", "model": NAME, "choices": [choice]}
        )

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()
