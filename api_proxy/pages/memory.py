"""*Memory*: the hints of a scope, the sentences that they came from, and what became of them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from api_proxy.pages.login_routes import checked_form
from api_proxy.pages.rendering import json_reply, page
from api_proxy.routes.hints_api import (
    answered,
    committed,
    hint_object,
    page_size,
    scope_of,
    status_of,
    unknown_hint,
    whole_hint,
)
from api_proxy.turns import TurnService
from records.hints.types import HintStatus

router = APIRouter()

Cursor = Annotated[str | None, Query()]


@router.get("/ui/memory")
async def memory_page(
    request: Request, status: Cursor = None, after: Cursor = None, limit: str = "20"
) -> Response:
    """The hints, newest first, of one status if it is given."""
    found = await _hints(request, status or None, after, limit)
    more = {"status": status or "", "after": found["last_id"], "limit": limit}
    return await page(
        request,
        "memory.html.jinja",
        hints=found["data"],
        status=status,
        statuses=list(HintStatus),
        next=urlencode(more) if found["has_more"] else None,
    )


@router.get("/v1/runs/current/memory")
async def memory_json(
    request: Request, status: Cursor = None, after: Cursor = None, limit: str = "20"
) -> Response:
    """The same as JSON."""
    return json_reply(await _hints(request, status, after, limit))


@router.get("/ui/memory/{hint_id}")
async def hint_page(request: Request, hint_id: str) -> Response:
    """One hint."""
    found = await _hint(request, hint_id)
    parts = {name: found.pop(name) for name in ("sources", "prompts", "states", "versions")}
    return await page(request, "hint.html.jinja", hint=found, **parts)


@router.get("/v1/runs/current/memory/{hint_id}")
async def hint_json(request: Request, hint_id: str) -> Response:
    """The same as JSON."""
    return json_reply(await _hint(request, hint_id))


@router.post("/ui/memory/{hint_id}/delete")
async def delete_hint(request: Request, hint_id: str) -> Response:
    """Delete a hint, as `DELETE /v1/hints/{id}` does."""
    await checked_form(request)
    service: TurnService = request.app.state.service
    scope = scope_of(request)
    if await committed(service, service.deps.store.delete_hint(hint_id, scope=scope)) is None:
        raise unknown_hint(hint_id)
    return RedirectResponse("/ui/memory", status_code=303)


async def _hints(
    request: Request, status: str | None, after: str | None, limit: str
) -> dict[str, Any]:
    service: TurnService = request.app.state.service
    store = service.deps.store
    number, wanted = page_size(limit), status_of(status)
    found = await answered(
        service,
        store.hints(
            scope=scope_of(request),
            statuses=None if wanted is None else [wanted],
            limit=number + 1,
            after=after,
        ),
    )
    shown = found[:number]
    words = await answered(service, store.newest_words([one.hint_id for one in shown]))
    return {
        "object": "list",
        "data": [{**hint_object(one), "came_from": words.get(one.hint_id)} for one in shown],
        "last_id": shown[-1].hint_id if shown else None,
        "has_more": len(found) > number,
    }


async def _hint(request: Request, hint_id: str) -> dict[str, Any]:
    service: TurnService = request.app.state.service
    found = await whole_hint(service, hint_id, scope_of(request))
    states = await answered(service, service.deps.store.hint_states(hint_id))
    measured = service.deps.hint_versions
    versions = None if measured is None else await asyncio.to_thread(measured, found["id"])
    return {
        **found,
        "states": [{"turn_id": one.turn_id, "measures": one.held_out} for one in states],
        "versions": None if versions is None else [asdict(one) for one in versions],
    }
