"""What the workers of an endpoint have in common, seen from several of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import text

from api_proxy.access.limits import Limits
from api_proxy.access.logins import LOGIN_S, Logins
from api_proxy.app import ProxyDeps
from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError
from api_proxy.linking.lineage import LineageFinder
from api_proxy.linking.sessions import Sessions
from api_proxy.metrics import ProxyMetrics
from api_proxy.sharing.sharing import OtherProgram, Sharing
from records.config import StoreConfig
from records.keys import KeyLimits, Keys
from records.names import TurnState
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.conftest import Clock, Door, a_door
from tests.api_proxy.scripted_engine import ScriptedEngine
from tests.records.builders import a_turn
from tests.records.looking import list_turns

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "Hello, what can I do for you today?"}


def workers_of(number: int) -> list[Sharing]:
    """As each worker of an endpoint has it."""
    made = Sharing.create(number)
    return [Sharing.join(made.descriptor, one, number) for one in range(1, number + 1)]


def restarted(one: Sharing) -> Sharing:
    return Sharing.join(one.descriptor, one.number, one.workers)


def refused(begin: Callable[[], None]) -> bool:
    try:
        begin()
    except ApiError as error:
        return error.status == 429
    return False


def test_a_worker_of_another_version_does_not_join() -> None:
    made = Sharing.create(2)
    os.pwrite(made.descriptor, b"other", 0)
    with pytest.raises(OtherProgram, match="restart it"):
        Sharing.join(made.descriptor, 1, 2)


async def test_limits_of_a_key_hold_for_all_workers_together(store: Store, clock: Clock) -> None:
    wanted = KeyLimits(requests_per_minute=4, max_concurrent=3)
    key, _ = await Keys(store, clock).create(actor="test", limits=wanted)
    first, second = workers_of(2)
    one, two = (Limits(clock, ProxyMetrics(), each) for each in (first, second))
    for limits in (one, two, one, two):
        limits.request(key)
    assert refused(lambda: one.request(key))
    assert refused(lambda: two.request(key))
    clock.now += 15
    two.request(key)
    one.begin(key, 2)
    two.begin(key, 1)
    assert refused(lambda: two.begin(key, 1))
    one.end(key, 1)
    two.begin(key, 1)
    assert refused(lambda: one.begin(key, 1))


async def test_what_a_killed_worker_was_answering_no_longer_counts(
    store: Store, clock: Clock
) -> None:
    key, _ = await Keys(store, clock).create(actor="test", limits=KeyLimits(max_concurrent=2))
    first, second = workers_of(2)
    one, two = (Limits(clock, ProxyMetrics(), each) for each in (first, second))
    two.begin(key, 2)
    assert refused(lambda: one.begin(key, 1))
    two = Limits(clock, ProxyMetrics(), restarted(second))
    one.begin(key, 1)
    two.begin(key, 1)
    assert refused(lambda: two.begin(key, 1))


async def test_tokens_that_a_reply_used_count_at_every_worker(store: Store, clock: Clock) -> None:
    key, _ = await Keys(store, clock).create(actor="test", limits=KeyLimits(tokens_per_minute=60))
    one, two = (Limits(clock, ProxyMetrics(), each) for each in workers_of(2))
    one.request(key)
    two.used(key, 70)
    assert refused(lambda: one.request(key))
    clock.now += 12
    one.request(key)


def test_a_login_is_one_at_every_worker(clock: Clock) -> None:
    one, two = (Logins(clock, each) for each in workers_of(2))
    cookie = one.begin("0123456789ab", bytes(range(32)))
    login = two.of(cookie)
    assert login is not None
    assert (login.key_id, login.secret_hash) == ("0123456789ab", bytes(range(32)))
    assert one.is_csrf(one.of(cookie), login.csrf)
    assert one.is_csrf(None, two.csrf_of(None))
    assert not one.is_csrf(one.of(cookie), two.csrf_of(None))
    assert two.of("another") is None
    two.end(cookie)
    assert one.of(cookie) is None
    clock.now += LOGIN_S
    assert two.of(one.begin("0123456789ab", bytes(32))) is not None


def test_a_key_has_fifty_logins_and_ends_none_of_another_key(clock: Clock) -> None:
    one, two = (Logins(clock, each) for each in workers_of(2))
    other = one.begin("another", bytes(32))
    cookies = [logins.begin("key", bytes(32)) for _ in range(26) for logins in (one, two)]
    assert [one.of(cookie) is not None for cookie in cookies] == [False] * 2 + [True] * 50
    assert two.of(other) is not None
    one.end(cookies[-1])
    one.begin("key", bytes(32))
    assert one.of(cookies[2]) is not None, "one that has logged out leaves its place"
    late = one.begin("late", bytes(32))
    clock.now += LOGIN_S
    assert two.of(late) is None


async def test_names_of_deleted_sessions_are_forgotten_by_every_worker(store: Store) -> None:
    one, two = (Sessions(store, 60.0, 60.0, each) for each in workers_of(2))
    named = await one.named("scope", "name")
    assert await two.named("scope", "name") == named
    await store.writer.run(lambda connection: connection.execute(text("DELETE FROM sessions")))
    assert await two.named("scope", "name") == named, "nobody has said that it is gone"
    one.forget_names()
    assert await two.named("scope", "name") != named


async def twins(store: Store) -> list[str]:
    """Two conversations that are equal so far; the ids of their turns."""
    made = []
    for _ in range(2):
        session = await store.ensure_session(scope="scope", external_id=None)
        turn = a_turn(session, messages=[HI], response=HELLO)
        await store.record_turn(turn, scope="scope")
        made.append(turn.turn_id)
    return made


@pytest.mark.parametrize(
    "clock_in_prompt", [False, True], ids=["equal history", "rewritten history"]
)
async def test_two_workers_at_the_same_moment_do_not_answer_one_turn(
    store: Store, clock_in_prompt: bool
) -> None:
    """Of rewritten histories, both workers have compared the same candidates before either of them
    takes one.
    """
    history = [{"role": "system", "content": "It is ten."}] * clock_in_prompt + [HI, HELLO]
    for _ in range(5):
        ids = await twins(store)
        shared = workers_of(2)
        finders = [LineageFinder(store, 1e9, 32, sharing=each) for each in shared]
        found = await asyncio.gather(
            *(
                finder.find(
                    scope="scope",
                    messages=[*history, {"role": "user", "content": f"I am number {number}."}],
                    session_id=None,
                    now=1000.0,
                )
                for number, finder in enumerate(finders)
            )
        )
        parents = [one.link.parent.turn_id for one in found if one.link.parent is not None]
        assert sorted(parents) == sorted(ids)
        for parent in parents:
            await store.set_next_state(parent, [HI])


async def test_a_request_that_is_sent_again_to_another_worker_is_the_same_one(
    store: Store,
) -> None:
    await twins(store)
    one, two = (LineageFinder(store, 1e9, 32, sharing=each) for each in workers_of(2))
    asked = {"scope": "scope", "session_id": None, "now": 1000.0}
    messages = [HI, HELLO, {"role": "user", "content": "Go on."}]
    first = await one.find(messages=messages, **asked)
    again = await two.find(messages=messages, **asked)
    assert first.link.parent is not None
    assert again.link.parent is not None
    assert first.link.parent.turn_id == again.link.parent.turn_id
    assert again.link.retry
    node = "node of a first prompt"
    one.left(node, "session")
    lineage = await two.find(messages=[HI], path=[node], **asked)
    assert (lineage.session_id, lineage.is_repeated) == ("session", True)
    lineage = await one.find(messages=[HI], path=[node], **asked)
    assert lineage.session_id is None, "it is continued once"


@pytest.fixture
async def doors(tmp_path: Path, rendering: Rendering, clock: Clock) -> AsyncIterator[list[Door]]:
    """Two workers, each with a store of its own on one database."""
    async with AsyncExitStack() as stack:
        made = []
        for sharing in workers_of(2):
            config = StoreConfig.sqlite(tmp_path / "records.db")
            store = await stack.enter_async_context(await Store.open(config, clock))
            engine = ScriptedEngine()
            deps = ProxyDeps(
                store=store,
                engine=engine,
                rendering=rendering,
                config=ProxyConfig(record_timeout_s=30.0, spill_retry_s=0.05),
                clock=clock,
                metrics_folder=tmp_path / "metrics",
                sharing=sharing,
            )
            made.append(await stack.enter_async_context(a_door(deps, engine)))
        yield made


async def fill(door: Door, pages: int) -> None:
    """Let this worker's connection grow the file no further than so many pages."""
    limit = text(f"PRAGMA max_page_count={pages}")
    await door.store.writer.run(lambda connection: connection.execute(limit).all())


async def test_a_conversation_that_wanders_while_one_worker_cannot_store_is_linked_in_the_end(
    doors: list[Door],
) -> None:
    """The first worker's disk is full: what it spills comes before what the other one answers."""
    history: list[dict] = []
    for number, door in enumerate([doors[0], doors[1], doors[0], doors[1], doors[1]]):
        if number == 1:
            await fill(doors[0], 1)
        words = "again " * 500 if number == 2 else ""
        history.append({"role": "user", "content": f"Question {number}? {words}"})
        door.will_say(f"Answer {number}.")
        response = await door.post(history)
        assert response.status_code == 200
        history.append({"role": "assistant", "content": f"Answer {number}."})
    assert [(await door.client.get("/readyz")).status_code for door in doors] == [503, 503]
    assert len(await list_turns(doors[0].store)) == 2, "the third, and all after it, wait"
    await fill(doors[0], 1_000_000)
    async with asyncio.timeout(60):
        while any(door.app.state.service.spool.is_waiting for door in doors):
            await asyncio.sleep(0.02)
    refs = await list_turns(doors[0].store)
    turns = sorted(
        await doors[0].store.turns([ref.turn_id for ref in refs]), key=lambda one: one.created_at
    )
    assert [one.parent_turn_id for one in turns] == [None, *(one.turn_id for one in turns[:-1])]
    assert len({one.session_id for one in turns}) == 1
    assert [one.state for one in turns] == [TurnState.JUDGING] * 4 + [TurnState.AWAITING_NEXT_STATE]
    assert [(await door.client.get("/readyz")).status_code for door in doors] == [200, 200]
