"""What every request for a turn goes through, whatever API it speaks: body, key, model, turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import Request

from api_proxy.errors import ApiError, body_too_large, model_not_found
from api_proxy.schemas import Completion
from api_proxy.sessions import authorization_of, scope_of
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

Parse: TypeAlias = Callable[[bytes, str], Awaitable[Completion]]
"""Makes the request of a body, in the scope of the key that sent it; raises ApiError."""


async def admitted(request: Request, parse: Parse) -> Turn:
    """The turn that a request asks for, ready to be sampled. Raises ApiError; refusals count."""
    service: TurnService = request.app.state.service
    completion, authorization = await checked(request, parse)
    try:
        return await service.prepare(completion, authorization)
    except ApiError as error:
        service.metrics.requests.labels(str(error.status)).inc()
        raise


async def checked(request: Request, parse: Parse) -> tuple[Completion, str | None]:
    """What a request asks for, and its credentials. Raises ApiError; refusals count."""
    service: TurnService = request.app.state.service
    config = service.config
    try:
        authorization = authorization_of(request.headers)
        raw = await body_of(request, config.max_body_bytes)
        completion = await parse(raw, scope_of(authorization))
        if completion.fields.model != config.model_name:
            raise model_not_found(completion.fields.model)
    except ApiError as error:
        service.metrics.requests.labels(str(error.status)).inc()
        raise
    return completion, authorization


async def body_of(request: Request, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 once it is longer than `limit` bytes."""
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
