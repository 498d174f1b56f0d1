"""*Now*: the run's status and what it learns from, kept up to date while somebody looks.

However many people look, and however much is stored, reading takes a small part of a core: what was
read is shared, and read again only after fifty times as long as reading it took.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from api_proxy.errors import ApiError
from api_proxy.pages.rendering import HEADERS, fragment, json_reply, page
from api_proxy.routes.hints_api import answered, scope_of
from api_proxy.turns import TurnService
from records.hints.types import HintStatus

router = APIRouter()

LEAST_S = 2.0
"""At least this long between two readings."""
_TIMES = 80
"""Longer than a reading took, so that watching takes little more than 1% of a core."""
STREAM_S = 60.0
"""A browser asks again after this long, and its login is checked again."""
_MOST_STREAMS = 100
_MOST_SCOPES = 100
_HINTS = 5
_SHOWN = [one for one in HintStatus if one not in (HintStatus.MERGED, HintStatus.DELETED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was read, also as HTML; `until`: when it is read again (monotonic seconds)."""

    values: dict[str, Any]
    html: str
    until: float


class NowFeed:
    """The newest snapshot of each scope that somebody looks at."""

    def __init__(self, service: TurnService) -> None:
        self._service = service
        self._snapshots: OrderedDict[str | None, Snapshot] = OrderedDict()
        self._lock = asyncio.Lock()
        self._failed: tuple[ApiError, float] | None = None
        """Why nothing could be read, and until when nobody tries again (monotonic seconds)."""
        self.streams = 0

    async def snapshot(self, scope: str | None) -> Snapshot:
        """What is known about a scope (None: about the run). Raises ApiError 503."""
        async with self._lock:
            found = self._snapshots.get(scope)
            if found is None or time.monotonic() >= found.until:
                began = time.monotonic()
                values = await self._values(scope)
                html = await asyncio.to_thread(fragment, "now_body.html.jinja", now=values)
                took = time.monotonic() - began
                until = time.monotonic() + max(LEAST_S, _TIMES * took)
                found = Snapshot(values=values, html=html, until=until)
            self._snapshots[scope] = found
            self._snapshots.move_to_end(scope)
            while len(self._snapshots) > _MOST_SCOPES:
                self._snapshots.popitem(last=False)
        return found

    async def _values(self, scope: str | None) -> dict[str, Any]:
        """As `_read`. Those who waited for a reading that failed do not wait for one each."""
        if self._failed is not None and time.monotonic() < self._failed[1]:
            raise self._failed[0]
        try:
            return await self._read(scope)
        except ApiError as error:
            self._failed = (error, time.monotonic() + LEAST_S)
            raise

    async def _read(self, scope: str | None) -> dict[str, Any]:
        """For an admin, queues and hints are in the run's status already, if there is one."""
        deps = self._service.deps
        store, now = deps.store, deps.clock()
        latest = await answered(self._service, store.latest_version())
        found: dict[str, Any] = {
            "object": "now",
            "time": now,
            "version": 0 if latest is None else latest.version,
            "version_age_s": None if latest is None else max(now - latest.created_at, 0.0),
        }
        if scope is None and deps.run_status is not None:
            status = await answered(self._service, deps.run_status())
            own = {name: status.pop(name) for name in ("queues", "learned_from")}
            return {**found, **own, "run": status}
        queues = await answered(self._service, store.queues(scope))
        waiting = {
            state.value: {
                "turns": one.turns,
                "oldest_s": None if one.since is None else max(now - one.since, 0.0),
            }
            for state, one in queues.items()
        }
        return {
            **found,
            "queues": waiting,
            "learned_from": await self._learned_from(scope),
            "run": None,
        }

    async def _learned_from(self, scope: str | None) -> list[dict[str, Any]]:
        store = self._service.deps.store
        hints = await answered(
            self._service, store.hints(scope=scope, statuses=_SHOWN, limit=_HINTS)
        )
        words = await answered(self._service, store.newest_words([one.hint_id for one in hints]))
        return [
            {
                "hint_id": one.hint_id,
                "hint": one.text,
                "status": one.status.value,
                "not_rehearsed": None if one.block is None else one.block.value,
                "words": words.get(one.hint_id),
            }
            for one in hints
        ]

    async def changes(self, scope: str | None) -> AsyncIterator[str]:
        """Server-sent events with the page's changing part, until it is time to ask again."""
        end = time.monotonic() + STREAM_S
        sent: Snapshot | None = None
        self.streams += 1
        try:
            while time.monotonic() < end and not self._service.closing.is_set():
                try:
                    found = await self.snapshot(scope)
                except ApiError as error:
                    yield _event(await asyncio.to_thread(_unavailable, error.message))
                    return
                if found is not sent:
                    sent = found
                    yield _event(found.html)
                wait_s = min(found.until, end) - time.monotonic()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._service.closing.wait(), max(wait_s, 0.1))
        finally:
            self.streams -= 1


def _event(html: str) -> str:
    return f"data: {json.dumps(html)}\n\n"


def _unavailable(message: str) -> str:
    return fragment("unavailable.html.jinja", message=message)


@router.get("/ui/now")
async def now_page(request: Request) -> Response:
    """The run's status."""
    feed: NowFeed = request.app.state.now
    found = await feed.snapshot(scope_of(request))
    return await page(request, "now.html.jinja", now=found.values)


@router.get("/ui/now/events")
async def now_events(request: Request) -> Response:
    """The same, kept up to date, as server-sent events."""
    feed: NowFeed = request.app.state.now
    if feed.streams >= _MOST_STREAMS:
        raise ApiError(
            503,
            "Too many pages are being kept up to date. Reload this one to update it.",
            code="busy",
        )
    return StreamingResponse(
        feed.changes(scope_of(request)), media_type="text/event-stream", headers=HEADERS
    )


@router.get("/v1/runs/current/now")
async def now_json(request: Request) -> Response:
    """The same as JSON."""
    feed: NowFeed = request.app.state.now
    return json_reply((await feed.snapshot(scope_of(request))).values)
