"""*Now*: who sees what of the run, how it is kept up to date, and what that costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from api_proxy.access.callers import tenant_scope
from api_proxy.pages import now
from opd.report.metrics.metrics_file import write_metrics
from opd.run import config as run_config
from opd.status.command import with_health
from opd.status.facts import read_now
from records.errors import StoreUnavailable
from records.names import TurnState
from records.store import Store
from rollout_bridge.guard.checks import add_check
from rollout_bridge.rehearsal.journal import Journal, PooledRow
from rollout_bridge.scoring.scoring_metrics import ScoringMetrics
from tests.api_proxy.conftest import Clock, Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.records.builders import a_score, a_session, turn_in
from tests.records.hints.test_memory import objected
from tests.rollout_bridge.guard.test_checks import moved
from tests.rollout_bridge.rehearsal.test_journal import a_row

NOW = "/v1/runs/current/now"
RunStatus = Callable[[], Awaitable[dict[str, Any]]]


@pytest.fixture
def run_status(tmp_path: Path, store: Store) -> RunStatus:
    """As `opd proxy` hands it over."""
    config = run_config.build(
        {
            "model": "none",
            "store": {"url": store.config.url},
            "judge": {"base_url": "http://127.0.0.1:9", "model": "none"},
        }
    )

    async def status() -> dict[str, Any]:
        return with_health(await read_now(config, tmp_path, store))

    return status


async def test_an_admin_sees_the_run_and_a_tenant_its_own(store: Store, login: Login) -> None:
    await objected(store, "use Celsius", scope=tenant_scope("acme"))
    await objected(store, "be brief", scope=tenant_scope("other"))
    await turn_in(store, TurnState.JUDGING, session_id=await a_session(store))
    mine, admin = await login("acme"), await login("admin")
    found = (await admin.get(NOW)).json()
    assert found["run"]["turns"] == 3
    assert found["queues"]["judging"]["turns"] == 1
    assert [one["hint"] for one in found["learned_from"]] == ["be brief", "use Celsius"]
    page = (await admin.get("/ui/now")).text
    assert "the run is not running" in page
    assert "I wanted Celsius." in page
    own = (await mine.get(NOW)).json()
    assert own["run"] is None
    assert own["queues"]["judging"]["turns"] == 0
    assert [one["hint"] for one in own["learned_from"]] == ["use Celsius"]
    page = (await mine.get("/ui/now")).text
    assert "be brief" not in page
    assert "Health" not in page


async def test_what_the_run_measured_is_shown(door: Door, tmp_path: Path) -> None:
    pooled = PooledRow(value=0.5, low=0.4, high=0.6, count=64, before=0.9, floor=0.8, passed=False)
    Journal(tmp_path).add(a_row(7).model_copy(update={"pooled": pooled}))
    add_check(tmp_path, moved(7))
    page = (await door.client.get("/ui/now")).text
    assert "not measured by steps; see the canaries" in page
    assert "tokens a scored turn" not in page
    door.app.state.now = now.NowFeed(door.app.state.service)
    step = {"time": time.time(), "version": 7, "staleness_mean": 0.5, "staleness_max": 2}
    step["kl_loss"] = 0.0425
    scoring = ScoringMetrics(CollectorRegistry())
    scoring.count_scored([a_score("t"), a_score("t")])
    write_metrics(tmp_path, "judge", [scoring.registry])
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n", encoding="utf-8")
    page = (await door.client.get("/ui/now")).text
    assert "version 6 is 0.125 from it; gap where it trained 0.2 (start 0.7)" in page
    assert "<dd>18 tokens a scored turn</dd>" in page
    assert "0.0425 nats a token, at the last step" in page
    for words in ("version 7, ", "0.5 versions old, at most 2", "0.50 (start 0.90, at least 0.80)"):
        assert words in page
    assert "open wishes are done too seldom" in page


async def test_it_is_read_once_for_all_who_look(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "LEAST_S", 3600.0)
    await door.client.get(NOW)
    reads = 0
    counts = door.store.counts

    async def counted() -> Any:
        nonlocal reads
        reads += 1
        return await counts()

    monkeypatch.setattr(door.store, "counts", counted)
    await asyncio.gather(*(door.client.get(NOW) for _ in range(5)))
    assert reads == 0
    door.app.state.now = now.NowFeed(door.app.state.service)
    await asyncio.gather(*(door.client.get(NOW) for _ in range(5)))
    once = reads
    assert once > 0
    await door.client.get(NOW)
    assert reads == once


async def test_it_is_read_less_often_where_reading_takes_long(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed: now.NowFeed = door.app.state.now
    latest = door.store.latest_version

    async def slow() -> Any:
        await asyncio.sleep(0.2)
        return await latest()

    monkeypatch.setattr(door.store, "latest_version", slow)
    found = await feed.snapshot(None)
    assert found.until - time.monotonic() > 0.9 * 50 * 0.2


async def test_an_open_page_hears_of_what_changes(
    door: Door, store: Store, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "LEAST_S", 0.05)
    monkeypatch.setattr(now, "_TIMES", 1)
    async with (
        httpx.AsyncClient(base_url=served, timeout=30) as client,
        client.stream("GET", "/ui/now/events") as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = events_in(stream)
        assert "Nothing yet" in await anext(events)
        await objected(store, "use Celsius", scope="anonymous")
        while "use Celsius" not in await anext(events):
            pass
        # Told to stop, the endpoint ends it.
        await door.app.state.service.stop()
        async for _ in events:
            pass
    assert door.app.state.now.streams == 0


async def events_in(stream: httpx.Response) -> Any:
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_too_many_open_pages_are_refused(door: Door) -> None:
    door.app.state.now.streams = 100
    assert (await door.client.get("/ui/now/events")).status_code == 503


async def test_a_store_that_does_not_answer_is_said(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down() -> Any:
        raise StoreUnavailable("locked")

    monkeypatch.setattr(door.store, "latest_version", down)
    page = await door.client.get("/ui/now")
    assert page.status_code == 503
    assert "The store does not answer" in page.text
    events = (await door.client.get("/ui/now/events")).text
    assert "The store does not answer" in events


@pytest.mark.parametrize("text", HOSTILE)
async def test_stored_text_stays_text(door: Door, store: Store, clock: Clock, text: str) -> None:
    await objected(store, text, scope="anonymous")
    page = await door.client.get("/ui/now")
    assert page.status_code == 200
    assert_harmless(page.text)
