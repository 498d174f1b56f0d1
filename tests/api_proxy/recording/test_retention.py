"""The sweep of old sessions, while the endpoint runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_proxy.linking.sessions import Sessions
from api_proxy.metrics import ProxyMetrics
from api_proxy.recording import retention
from records.care.housekeeping import Housekeeping
from records.config import RetentionConfig
from records.errors import StoreUnavailable
from records.names import TurnState
from records.types import TurnRef
from tests.api_proxy.conftest import Clock, Door
from tests.records.builders import OWNER, REPLY, a_verdict

DAY_S = 86_400.0
USER = {"role": "user", "content": "Hi"}


async def test_an_old_session_goes_and_its_name_can_be_used_again(door: Door, clock: Clock) -> None:
    sessions, metrics = door.app.state.service.sessions, ProxyMetrics()
    door.will_say("Hello.", "Hello again.", "And again.")
    _, old = await door.say([USER], session_id="chat")
    await door.store.set_next_state(old.turn_id, [REPLY])
    [claimed] = await door.store.claim(TurnState.JUDGING, owner=OWNER, limit=1, ttl_s=60.0)
    verdict = a_verdict(claimed.turn_id, None, reward=1.0)
    assert await door.store.commit_verdict(OWNER, verdict, None)
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
    assert "opd_retention_answers_total 1.0" in exposed
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


async def test_a_turn_that_is_deleted_while_a_request_is_compared_with_it_is_none(
    door: Door, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.will_say("It is 70 F.", "It is 21 C.")
    said, turn = await door.say([USER])
    find = door.store.turns_by_fingerprint

    async def then_deleted(*args: Any) -> list[TurnRef]:
        refs = await find(*args)
        assert [ref.turn_id for ref in refs] == [turn.turn_id]
        await Housekeeping(door.store, clock).delete([turn.session_id], "forget", patience_s=0.0)
        return refs

    monkeypatch.setattr(door.store, "turns_by_fingerprint", then_deleted)
    rewritten = [{"role": "system", "content": "Be brief."}, USER, said, USER]
    _, second = await door.say(rewritten)
    assert second.parent_turn_id is None
    metrics = (await door.client.get("/metrics")).text
    assert "opd_store_failed_lookups_total 0.0" in metrics
