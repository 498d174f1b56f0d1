"""The selector of the endpoint's event loop: few events at a time, and nobody is left out."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from api_proxy.server.event_loop import FewAtATime, run

NUM_PAIRS, MOST = 100, 16


@pytest.fixture
def readable() -> Iterator[list[socket.socket]]:
    """Sockets with something to read."""
    with ExitStack() as stack:
        ends = []
        for _ in range(NUM_PAIRS):
            here, there = socket.socketpair()
            stack.enter_context(here)
            stack.enter_context(there)
            there.send(b"x")
            ends.append(here)
        yield ends


@pytest.fixture
def selector(readable: list[socket.socket]) -> Iterator[FewAtATime]:
    with FewAtATime(MOST) as made:
        for sock in readable:
            made.register(sock, selectors.EVENT_READ)
        yield made


def test_each_is_reported_before_any_is_again(selector: FewAtATime) -> None:
    counts: Counter[int] = Counter()
    for _ in range(3):
        reported = 0
        while reported < NUM_PAIRS:
            events = selector.select(0)
            assert 0 < len(events) <= MOST
            counts.update(key.fd for key, _ in events)
            reported += len(events)
        assert len(set(counts.values())) == 1, counts
    assert len(counts) == NUM_PAIRS


def test_of_more_than_the_kernel_is_asked_for_all_have_their_turn() -> None:
    """Those that were left out of its list come first the next time."""
    counts: Counter[int] = Counter()
    with ExitStack() as stack:
        selector = stack.enter_context(FewAtATime(MOST))
        for _ in range(4 * NUM_PAIRS):
            here, there = map(stack.enter_context, socket.socketpair())
            there.send(b"x")
            selector.register(here, selectors.EVENT_READ)
        while len(counts) < 4 * NUM_PAIRS:
            counts.update(key.fd for key, _ in selector.select(0))
            assert max(counts.values()) <= 2


def test_a_busy_loop_looks_for_new_events_now_and_then(readable: list[socket.socket]) -> None:
    with FewAtATime(NUM_PAIRS, rounds=4) as selector:
        for sock in readable:
            selector.register(sock, selectors.EVENT_READ)
        found = [len(selector.select(0)) for _ in range(8)]
        assert found == [0, 0, 0, NUM_PAIRS] * 2
        # A loop with nothing else to do waits for events, and looks at once.
        assert len(selector.select(1)) == NUM_PAIRS


def test_what_is_no_longer_asked_for_is_not_reported(
    selector: FewAtATime, readable: list[socket.socket]
) -> None:
    seen = {key.fd for key, _ in selector.select(0)}
    waiting = [sock for sock in readable if sock.fileno() not in seen]
    gone, changed = waiting[:40], waiting[40:]
    left = {sock.fileno() for sock in gone}
    for sock in gone:
        selector.unregister(sock)
        sock.close()
    for sock in changed:
        # It can be read from, too, but that is not what is asked for now.
        selector.modify(sock, selectors.EVENT_WRITE)
    found: dict[int, int] = {}
    for _ in range(20):
        found.update({key.fd: mask for key, mask in selector.select(0)})
    assert not left & found.keys()
    assert {found[sock.fileno()] for sock in changed} == {selectors.EVENT_WRITE}


def test_a_number_that_is_used_again_is_another_file(
    selector: FewAtATime, readable: list[socket.socket]
) -> None:
    """What waited for the closed one is nothing to the next one: it has nothing to read."""
    seen = {key.fd for key, _ in selector.select(0)}
    closed = next(sock for sock in readable if sock.fileno() not in seen)
    number = closed.fileno()
    with ExitStack() as stack:
        quiet, _ = [stack.enter_context(end) for end in socket.socketpair()]
        selector.unregister(closed)
        os.dup2(quiet.fileno(), number)
        selector.register(number, selectors.EVENT_READ)
        for _ in range(20):
            assert number not in {key.fd for key, _ in selector.select(0)}
        selector.unregister(number)


def test_timers_come_between_events() -> None:
    """A timer that is due waits for few of many readers, not for all of them."""

    async def readers_before_timer() -> int:
        loop = asyncio.get_running_loop()
        num_read = 0

        def read() -> None:
            nonlocal num_read
            num_read += 1

        with ExitStack() as stack:
            for _ in range(NUM_PAIRS):
                here, there = socket.socketpair()
                stack.enter_context(here)
                stack.enter_context(there)
                there.send(b"x")
                loop.add_reader(here, read)
                stack.callback(loop.remove_reader, here.fileno())
            await asyncio.sleep(1e-9)
        return num_read

    assert run(readers_before_timer()) < NUM_PAIRS / 2
