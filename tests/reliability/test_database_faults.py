"""The database server goes away while an agent talks: every answer comes, every turn is kept.

A database that is locked, full, or refuses to write: tests/api_proxy/recording/test_spool.py.
Connections that a living server ends: tests/records/database/test_postgresql.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import Clock, Door
from tests.api_proxy.recording.test_spool import (
    REPLY,
    THANKS,
    USER,
    a_process,
    answered,
    check_linked,
    conversation,
    settled,
)
from tests.records.conftest import new_database
from tests.reliability.faulty_tcp import FaultyTcp


@dataclass
class Away:
    """A door, and the wire between it and its database."""

    door: Door
    wire: FaultyTcp


@pytest.fixture(scope="module")
def database_url():
    with new_database() as url:
        yield url


@pytest.fixture
async def away(database_url: str, rendering: Rendering, tmp_path: Path) -> AsyncIterator[Away]:
    server = make_url(database_url)
    async with FaultyTcp(server.host or "", server.port or 5432) as wire:
        url = server.set(port=wire.own_port).render_as_string(hide_password=False)
        config = StoreConfig(url=url, spill_folder=tmp_path / "spill")
        async with a_process(config, rendering, Clock(), record_timeout_s=1.0) as door:
            yield Away(door, wire)


async def check_whole(away: Away, messages: list[dict]) -> None:
    """The conversation goes on and is found linked, whatever its middle met."""
    await settled(away.door)
    last = await answered(away.door, [*messages, THANKS], "Any time.")
    turns = await conversation(away.door.store)
    check_linked([turn for turn in turns if turn.messages[0] == last[0]])


def greeting(case: str) -> dict:
    """A first message that no other test of this database has."""
    return {"role": "system", "content": case}


async def test_a_server_that_is_gone_for_a_turn(away: Away) -> None:
    messages = await answered(away.door, [greeting("gone"), USER], "50 F.")
    await away.wire.refuse()
    messages = await answered(away.door, [*messages, REPLY], "10 C.")
    assert away.door.app.state.service.spool.is_waiting
    await away.wire.listen()
    await check_whole(away, messages)


async def test_connections_that_are_reset_under_a_turn(away: Away) -> None:
    messages = await answered(away.door, [greeting("reset"), USER], "50 F.")
    away.wire.reset()
    messages = await answered(away.door, [*messages, REPLY], "10 C.")
    await check_whole(away, messages)


async def test_a_server_that_vanished_is_given_up_and_found_again(
    database_url: str, tmp_path: Path
) -> None:
    server = make_url(database_url)
    async with FaultyTcp(server.host or "", server.port or 5432) as wire:
        url = server.set(port=wire.own_port).render_as_string(hide_password=False)
        config = StoreConfig(url=url, command_timeout_s=0.3, spill_folder=tmp_path / "spill")
        async with await Store.open(config) as store:
            await store.ensure_session(scope="", external_id="before")
            assert await store.ready_count() == 0
            wire.stall()
            async with asyncio.timeout(20):
                with pytest.raises(StoreUnavailable):
                    await store.ensure_session(scope="", external_id="meanwhile")
                with pytest.raises(StoreUnavailable):
                    await store.ready_count()
            wire.reset()
            wire.flow()
            await store.ensure_session(scope="", external_id="after")
            assert await store.ready_count() == 0


async def test_a_server_that_says_nothing_for_a_turn(away: Away) -> None:
    messages = await answered(away.door, [greeting("stalled"), USER], "50 F.")
    away.wire.stall()
    messages = await answered(away.door, [*messages, REPLY], "10 C.")
    assert away.door.app.state.service.spool.is_waiting
    away.wire.flow()
    await check_whole(away, messages)
