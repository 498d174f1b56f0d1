"""What every request for a turn goes through, whatever API it speaks: caller, body, model, turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import Request
from starlette.requests import ClientDisconnect

from api_proxy.callers import Caller, caller_of
from api_proxy.errors import (
    ApiError,
    body_too_large,
    body_too_slow,
    client_gone,
    model_not_found,
    shutting_down,
)
from api_proxy.schemas import Completion
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

Parse: TypeAlias = Callable[[bytes, str], Awaitable[Completion]]
"""Makes the request of a body, in the scope of who sent it; raises ApiError."""


async def admitted(request: Request, parse: Parse) -> Turn:
    """The turn that a request asks for, ready to be sampled and with a place to be left.

    Raises ApiError; refusals count.
    """
    service: TurnService = request.app.state.service
    completion, caller = await checked(request, parse)
    num_choices = completion.fields.n or 1
    try:
        place = await service.places.take(caller, num_choices, request.receive)
        try:
            turn = await service.prepare(completion, caller)
        except BaseException:
            place.leave()
            raise
    except ApiError as error:
        service.metrics.requests.labels(str(error.status)).inc()
        raise
    place.used(len(turn.prompt.ids) * num_choices)
    turn.place = place
    return turn


async def checked(request: Request, parse: Parse) -> tuple[Completion, Caller]:
    """What a request asks for, and who asks. Raises ApiError; refusals count."""
    service: TurnService = request.app.state.service
    config = service.config
    try:
        if service.replies.is_closing:
            raise shutting_down(config.retry_after_s)
        caller = caller_of(request)
        raw = await body_of(request, config.max_body_bytes, config.body_timeout_s)
        completion = await parse(raw, caller.scope)
        if completion.fields.model != config.model_name:
            raise model_not_found(completion.fields.model)
    except ApiError as error:
        service.metrics.requests.labels(str(error.status)).inc()
        raise
    return completion, caller


async def body_of(request: Request, limit: int, timeout_s: float) -> bytes:
    """The request's body. Raises ApiError 413 once it is longer than `limit` bytes, 408 once it
    takes longer than `timeout_s`, 499 if it never comes.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        raise body_too_slow(timeout_s) from None
    except ClientDisconnect:
        raise client_gone() from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
    return b"".join(parts)
