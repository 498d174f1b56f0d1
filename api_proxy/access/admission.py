"""What every request for a turn goes through, whatever API it speaks: caller, body, model, turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import Request
from starlette.requests import ClientDisconnect

from api_proxy.access.body_budget import HeldBody
from api_proxy.access.callers import Caller, caller_of
from api_proxy.access.encodings import check_encoding, decoded
from api_proxy.access.request_limits import RequestLimits
from api_proxy.errors import (
    ApiError,
    body_too_slow,
    client_gone,
    shutting_down,
)
from api_proxy.request.completion import Completion
from api_proxy.routes.model_list import check_name
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

TEXT_PATH = "/v1/completions"
"""Where a prompt may be a list of ids, as long as the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The fields of a request, as JSON, and the limits that they are under."""

    fields: dict[str, Any]
    num_bytes: int
    limits: RequestLimits


Parse: TypeAlias = Callable[[Body, str], Awaitable[Completion]]
"""Makes the request from a body, in its sender's scope; raises ApiError. Heavy work goes through
`TurnService.workers`.
"""


async def admitted(request: Request, parse: Parse) -> Turn:
    """The turn that a request asks for, ready to be sampled, with a place that must be left.

    Raises ApiError; refusals count.
    """
    service: TurnService = request.app.state.service
    completion, caller = await checked(request, parse)
    num_choices = completion.fields.n or 1
    try:
        await service.refuse_too_long(completion, caller)
        place = await service.places.take(caller, num_choices, request.receive)
        try:
            turn = await service.prepare(completion, caller)
        except BaseException:
            place.leave()
            raise
    except ApiError as error:
        count_refusal(service, error)
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
        raw = await body_of(request, service.request_limits.check_length, config.body_timeout_s)
        limits = await service.limits_for(len(raw))
        more = limits.context_length or 0 if request.scope["path"] == TEXT_PATH else 0
        fields = await service.workers.run(len(raw), limits.read, raw, more)
        body = Body(fields=fields, num_bytes=len(raw), limits=limits)
        completion = await parse(body, caller.scope)
        check_name(config, completion.fields.model)
    except ApiError as error:
        count_refusal(service, error)
        raise
    return completion, caller


def count_refusal(service: TurnService, error: ApiError) -> None:
    """Count a request that was answered with an error."""
    service.metrics.requests.labels(str(error.status)).inc()
    if error.limit is not None:
        service.metrics.refusals.note(error.limit)


async def body_of(request: Request, check: Callable[[int], None], timeout_s: float) -> bytes:
    """The request's body, decompressed. Raises what `check` raises for its length, before it is
    read if the length was announced; ApiError 429 or 503 if too much is held already, 408 once it
    takes longer than `timeout_s`, 415 if its compression is unknown, 400 if it is damaged, 499 if
    it never comes.
    """
    encoding = check_encoding(request.headers.get("content-encoding", ""))
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, check)
        return raw if encoding is None else await decoded(raw, encoding, check, request.state.body)
    except TimeoutError:
        raise body_too_slow(timeout_s) from None
    except ClientDisconnect:
        raise client_gone() from None


async def _read(request: Request, check: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    # Twenty digits are already longer than any body that could be read.
    if declared.isdecimal():
        check(int(declared[:20]))
    held: HeldBody = request.state.body
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        check(size)
        held.add(len(part))
        parts.append(part)
    return b"".join(parts)
