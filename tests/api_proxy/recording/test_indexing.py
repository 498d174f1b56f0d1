"""Texts are indexed while the endpoint runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import text

from api_proxy.metrics import ProxyMetrics
from api_proxy.recording import indexing
from records.errors import StoreUnavailable
from records.reading.browsing import Wanted
from records.search.indexing import RefusedText
from records.store import Store
from tests.records.builders import recorded


async def test_it_goes_on_after_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await recorded(store)
    for name in ("_BETWEEN_S", "_IDLE_S", "_FAILED_S"):
        monkeypatch.setattr(indexing, name, 0.01)
    index, calls = store.index_texts, 0

    async def failing_once(limit: int, on_refused: Callable[[RefusedText], None]) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreUnavailable("locked")
        return await index(limit, on_refused)

    monkeypatch.setattr(store, "index_texts", failing_once)
    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(indexing.index_texts(store, ProxyMetrics(), stop))
        while not (await _page(store)).sessions:
            await asyncio.sleep(0.01)
        stop.set()


async def test_a_text_that_is_refused_is_counted_and_said_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = await recorded(store, messages=[{"role": "user", "content": "poison"}])
    await recorded(store)
    await store.writer.run(
        lambda connection: connection.execute(
            text(
                "CREATE TRIGGER refuses BEFORE INSERT ON turn_words_0_content "
                "WHEN new.c0 LIKE '%poison%' BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        )
    )
    for name in ("_BETWEEN_S", "_IDLE_S", "_FAILED_S"):
        monkeypatch.setattr(indexing, name, 0.01)
    metrics, stop = ProxyMetrics(), asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(indexing.index_texts(store, metrics, stop))
        while (await _page(store)).num_waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        stop.set()
    assert (await _page(store)).num_refused == 1
    labels = {"reason": "database"}
    assert metrics.registry.get_sample_value("opd_texts_refused_total", labels) == 1
    assert caplog.text.count(f"turn {bad} is not searched") == 1


async def _page(store: Store):
    return await store.found_page(None, wanted=Wanted(), phrases=["70"], after=None, limit=1)
