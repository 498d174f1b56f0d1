"""What the routes share: bodies, replies, waiting for a request, noticing that a client left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.embedded.scheduling.request import EngineRequest
from rollout_bridge.embedded.server.replies import ReplyWriter


async def read_body(http_request: Request) -> Any:
    """The body's JSON, {} if there is none. Raises BadRequest, even if the client left before all
    of it arrived: nobody reads the answer, and it is not the engine's fault.
    """
    try:
        content = await http_request.body()
    except ClientDisconnect:
        raise BadRequest("the client left before its request was complete") from None
    try:
        return orjson.loads(content) if content else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"JSON decode error: {error}") from None


def json_reply(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def openai_error(message: str, kind: str = "BadRequestError", status: int = 400) -> Response:
    """An error in the shape of the OpenAI routes."""
    return json_reply(
        {"object": "error", "message": message, "type": kind, "param": None, "code": status}, status
    )


def validation_reply(message: str) -> Response:
    """An error about the form of a body."""
    return openai_error(message, kind="Bad Request")


async def finished(engine: Engine, http_request: Request, requests: list[EngineRequest]) -> bool:
    """Wait for all requests; False, and they are aborted, if the client left first."""

    async def wait_all() -> None:
        for request in requests:
            await request.context.wait()

    done = asyncio.ensure_future(wait_all())
    left = asyncio.ensure_future(_client_left(http_request))
    try:
        await asyncio.wait((done, left), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return True
    finally:
        completed = done.done()
        for task in (done, left):
            task.cancel()
        if not completed:
            for request in requests:
                await engine.abort(request.rid)
    return False


async def news(engine: Engine, request: EngineRequest) -> AsyncGenerator[bool, None]:
    """Yields whenever a streamed request has something new; True once, when it has ended.

    If the consumer stops early, because its client left, the request is aborted.
    """
    ended = False
    try:
        while not ended:
            await request.context.wait()
            request.context.clear()
            ended = request.finish is not None or request.error is not None
            yield ended
    finally:
        if not ended:
            await engine.abort(request.rid)


async def event_stream(
    engine: Engine, request: EngineRequest, writer: ReplyWriter
) -> AsyncIterator[bytes]:
    """The events of a streamed /generate."""
    async with contextlib.aclosing(news(engine, request)) as changes:
        async for ended in changes:
            if request.error is None:
                event = writer.event(ended)
                if event is not None:
                    yield event
                continue
            error = {"message": request.error, "type": "server_error", "code": 500}
            yield b"data: " + orjson.dumps({"error": error}) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _client_left(http_request: Request) -> None:
    while (await http_request.receive())["type"] != "http.disconnect":
        pass
