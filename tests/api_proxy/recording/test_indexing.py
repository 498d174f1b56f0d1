"""Texts are indexed while the endpoint runs."""

from __future__ import annotations

import asyncio

import pytest

from api_proxy.recording import indexing
from records.errors import StoreUnavailable
from records.reading.browsing import Wanted
from records.store import Store
from tests.records.builders import recorded


async def test_it_goes_on_after_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await recorded(store)
    for name in ("_BETWEEN_S", "_IDLE_S", "_FAILED_S"):
        monkeypatch.setattr(indexing, name, 0.01)
    index, calls = store.index_texts, 0

    async def failing_once(limit: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreUnavailable("locked")
        return await index(limit)

    monkeypatch.setattr(store, "index_texts", failing_once)
    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(indexing.index_texts(store, stop))
        while not (await _page(store)).sessions:
            await asyncio.sleep(0.01)
        stop.set()


async def _page(store: Store):
    return await store.found_page(None, wanted=Wanted(), phrases=["70"], after=None, limit=1)
