"""The sweep of old sessions, while the endpoint runs."""

from __future__ import annotations

import asyncio

import pytest

from api_proxy import retention
from api_proxy.metrics import ProxyMetrics
from api_proxy.sessions import Sessions
from records.config import RetentionConfig
from records.errors import StoreUnavailable
from records.housekeeping import Housekeeping
from tests.api_proxy.conftest import Clock, Door

DAY_S = 86_400.0
USER = {"role": "user", "content": "Hi"}


async def test_an_old_session_goes_and_its_name_can_be_used_again(door: Door, clock: Clock) -> None:
    sessions, metrics = door.app.state.service.sessions, ProxyMetrics()
    door.will_say("Hello.", "Hello again.", "And again.")
    _, old = await door.say([USER], session_id="chat")
    clock.now += 2 * DAY_S
    _, young = await door.say([USER], session_id="other")
    stop = asyncio.Event()
    config = RetentionConfig(max_age_days=1.0, sweep_interval_s=60.0)
    keeper = Housekeeping(door.store, clock)
    sweeping = asyncio.create_task(retention.sweep(keeper, config, metrics, sessions, stop))
    async with asyncio.timeout(60):
        while await door.store.has_turn(old.turn_id):
            await asyncio.sleep(0.01)
    stop.set()
    await sweeping
    assert await door.store.has_turn(young.turn_id)
    exposed = metrics.exposition().decode()
    assert "opd_retention_sessions_total 1.0" in exposed
    assert "opd_retention_turns_total 1.0" in exposed
    _, again = await door.say([USER], session_id="chat")
    assert again.session_id != old.session_id


async def test_a_store_that_fails_does_not_end_the_sweep(
    door: Door, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, stop, rounds = Housekeeping(door.store, clock), asyncio.Event(), 0

    async def failing(max_age_days: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            stop.set()
        raise StoreUnavailable("database is locked")

    monkeypatch.setattr(keeper, "expire", failing)
    config = RetentionConfig(max_age_days=1.0, sweep_interval_s=0.01)
    sessions: Sessions = door.app.state.service.sessions
    await retention.sweep(keeper, config, ProxyMetrics(), sessions, stop)
    assert rounds == 2
