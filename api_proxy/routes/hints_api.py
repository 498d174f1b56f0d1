"""`/v1/hints`: what was learned from objections, read and deleted by those whose turns it came
from.

A key sees the hints of its own tenant, an admin's key all. Texts are what the judge wrote and what
users said, as they are stored: redacted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request

from api_proxy.access.admission import count_refusal
from api_proxy.access.callers import caller_of
from api_proxy.errors import ApiError, invalid, store_unavailable
from api_proxy.turns import TurnService
from records.errors import StoreCorrupt, StoreError, StoreSchemaError, UnknownTurn
from records.hints.texts import measuring_texts
from records.hints.types import Hint, HintStatus

router = APIRouter()
T = TypeVar("T")

_MOST = 100
READ_S = 5.0
"""How long a person, or who reads for one, waits for the store."""
_SLOW = (
    "The store did not answer in time: another program may hold its lock, or be migrating it. "
    "Please try again."
)
_UNSURE = (
    "The store did not confirm the change in time: another program may hold its lock. The change "
    "may have been made or not; look again before you repeat it."
)


@router.get("/v1/hints")
async def hints(
    request: Request,
    limit: Annotated[str, Query()] = "20",
    after: Annotated[str | None, Query()] = None,
    status: Annotated[str | None, Query()] = None,
) -> dict[str, Any]:
    """The newest hints, or those that follow the hint `after`; of one `status` if it is given."""
    service: TurnService = request.app.state.service
    try:
        number, wanted = page_size(limit), status_of(status)
        found = await answered(
            service,
            service.deps.store.hints(
                scope=scope_of(request),
                statuses=None if wanted is None else [wanted],
                limit=number + 1,
                after=after,
            ),
        )
    except ApiError as error:
        count_refusal(service, error)
        raise
    shown = [hint_object(one) for one in found[:number]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > number,
    }


@router.get("/v1/hints/{hint_id}")
async def hint(request: Request, hint_id: str) -> dict[str, Any]:
    """A hint with where it came from and what was written for its lessons."""
    service: TurnService = request.app.state.service
    try:
        return await whole_hint(service, hint_id, scope_of(request))
    except ApiError as error:
        count_refusal(service, error)
        raise


async def whole_hint(service: TurnService, hint_id: str, scope: str | None) -> dict[str, Any]:
    """A hint that `scope` may see, as JSON. Raises ApiError 404 or 503."""
    store = service.deps.store
    found = await answered(service, store.hint(hint_id))
    if found is None or scope not in (None, found.scope):
        raise unknown_hint(hint_id)
    sources = await answered(service, store.hint_sources(hint_id))
    prompts = await answered(service, store.hint_prompts(hint_id))
    measuring = measuring_texts(prompts)
    return {
        **hint_object(found),
        "sources": [
            {
                "turn_id": one.turn_id,
                "session_id": one.session_id,
                "text": one.text,
                "words": one.words,
                "votes": one.num_votes,
                "positive_votes": one.num_positive,
                "created": int(one.created_at),
            }
            for one in sources
        ],
        "prompts": [
            {
                "kind": one.kind.value,
                "text": one.text,
                "measures": one.prompt_id in measuring,
                "asked": one.asked,
                "followed": one.followed,
                "dropped": one.dropped,
            }
            for one in prompts
        ],
    }


@router.delete("/v1/hints/{hint_id}")
async def delete(request: Request, hint_id: str) -> dict[str, Any]:
    """Delete a hint; the reply names the versions of the policy that trained on it."""
    service: TurnService = request.app.state.service
    try:
        gone = await committed(
            service, service.deps.store.delete_hint(hint_id, scope=scope_of(request))
        )
        if gone is None:
            raise unknown_hint(hint_id)
    except ApiError as error:
        count_refusal(service, error)
        raise
    return {"id": hint_id, "object": "hint", "deleted": True, "versions": list(gone.versions)}


def hint_object(hint: Hint) -> dict[str, Any]:
    """A hint as JSON. Gaps are nats per token; what was not measured is null."""
    return {
        "id": hint.hint_id,
        "object": "hint",
        "created": int(hint.created_at),
        "scope": hint.scope,
        "text": hint.text,
        "status": hint.status.value,
        "detail": hint.detail,
        "confirmed": hint.num_confirmed,
        "is_rule": hint.is_rule,
        "not_rehearsed": None if hint.block is None else hint.block.value,
        "opposed_by": hint.opposed_by,
        "merged_into": hint.merged_into,
        "trained_since_version": hint.trained_since,
        "steps": hint.num_steps,
        "first_gap": hint.first_gap,
        "gap": hint.gap,
        "gap_high": hint.gap_high,
    }


def scope_of(request: Request) -> str | None:
    """The scope that a caller sees; None for all."""
    caller = caller_of(request)
    return None if caller.is_admin else caller.scope


def page_size(limit: str) -> int:
    """How many entries a page has. Raises ApiError 400."""
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MOST:
        raise invalid(f"'limit' must be a whole number from 1 to {_MOST}.", "limit")
    return int(limit)


def status_of(name: str | None) -> HintStatus | None:
    """A hint's status by its name. Raises ApiError 400."""
    if name is None:
        return None
    try:
        return HintStatus(name)
    except ValueError:
        known = ", ".join(HintStatus)
        raise invalid(f"'status' must be one of {known}.", "status") from None


async def answered(service: TurnService, asked: Awaitable[T], slow: str = _SLOW) -> T:
    """What the store answers. Raises ApiError 503 if it does not answer in READ_S, which `slow`
    says, or has another schema, and 500 if what is stored is damaged.
    """
    try:
        async with asyncio.timeout(READ_S):
            return await asked
    except TimeoutError:
        raise store_unavailable(service.config.retry_after_s, slow) from None
    except StoreError as error:
        raise store_refusal(service, error) from error


async def committed(service: TurnService, change: Awaitable[T]) -> T:
    """What the store says once a change is committed. Raises as `answered`; after READ_S, the
    change may have been made or not.
    """
    return await answered(service, change, _UNSURE)


def store_refusal(service: TurnService, error: StoreError) -> ApiError:
    """What is said to somebody who asked for something that the store cannot give."""
    if isinstance(error, StoreSchemaError):
        return ApiError(503, f"The store: {error}.", kind="server_error", code="store_schema")
    if isinstance(error, StoreCorrupt | UnknownTurn):
        return ApiError(
            500,
            f"What is stored of it is incomplete or damaged ({error}). `opd records verify` lists "
            "what is; a backup may have it whole.",
            kind="server_error",
            code="record_damaged",
        )
    return store_unavailable(service.config.retry_after_s)


def unknown_hint(hint_id: str) -> ApiError:
    """404: there is no such hint, or none that the caller may see."""
    message = f"No hint with id {hint_id[:100]!r} was found."
    return ApiError(404, message, param="hint_id", code="hint_not_found")
