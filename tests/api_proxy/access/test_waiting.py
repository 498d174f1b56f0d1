"""The queue before the engine: bounded, and fair among tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from api_proxy.access.waiting import Closed, FairQueue, QueueFull


class Crowd:
    """Requests of several tenants at one queue; `begun` and `refused` in their order."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, size: int = 1) -> None:
        """Each name is a tenant's letter and a number."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._enter(name, size))
            await settle()

    async def _enter(self, name: str, size: int) -> None:
        try:
            await self.queue.enter(name[0], size)
        except (QueueFull, Closed):
            self.refused.append(name)
        else:
            self.begun.append(name)

    async def go(self, *names: str) -> None:
        """Those that were begun are over."""
        for name in names:
            self.queue.leave(name[0])
            await settle()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
def crowd_of() -> Callable[[int, int], Crowd]:
    return lambda running, waiting: Crowd(FairQueue(running, waiting))


async def test_who_finds_a_place_does_not_wait(crowd_of: Callable[[int, int], Crowd]) -> None:
    crowd = crowd_of(2, 0)
    await crowd.come("a1", "b1")
    assert crowd.begun == ["a1", "b1"]
    assert crowd.queue.num_waiting == 0


async def test_a_burst_costs_another_tenant_one_turn(
    crowd_of: Callable[[int, int], Crowd],
) -> None:
    crowd = crowd_of(1, 100)
    await crowd.come(*(f"a{number}" for number in range(9)))
    await crowd.come("b0", "b1", "c0")
    for _ in range(4):
        await crowd.go(crowd.begun[-1])
    assert crowd.begun[1:4] == ["b0", "c0", "a1"]
    assert crowd.begun[4] == "b1"


async def test_free_places_go_to_who_has_fewest(crowd_of: Callable[[int, int], Crowd]) -> None:
    crowd = crowd_of(4, 100)
    await crowd.come(*(f"a{number}" for number in range(8)), *(f"b{number}" for number in range(8)))
    await crowd.go("a0", "a1")
    assert crowd.begun[4:] == ["b0", "b1"]
    await crowd.go("a2")
    # Two of b and one of a are running: now it is a's turn.
    assert crowd.begun[6:] == ["a4"]


async def test_where_it_is_full_the_longest_line_gives_way(
    crowd_of: Callable[[int, int], Crowd],
) -> None:
    crowd = crowd_of(1, 3)
    await crowd.come("a0", "a1", "a2", "a3")
    assert crowd.refused == []
    await crowd.come("a4")
    assert crowd.refused == ["a4"]
    await crowd.come("b0")
    assert crowd.refused == ["a4", "a3"]
    assert crowd.queue.num_waiting == 3


async def test_a_large_request_is_not_overtaken_for_ever(
    crowd_of: Callable[[int, int], Crowd],
) -> None:
    crowd = crowd_of(2, 100)
    await crowd.come("a0", "a1")
    await crowd.come("b0", size=2)
    await crowd.come("c0")
    await crowd.go("a0")
    assert crowd.begun == ["a0", "a1"]
    await crowd.go("a1")
    assert crowd.begun[2] == "b0"
    crowd.queue.leave("b", 2)
    await settle()
    assert crowd.begun[3] == "c0"


async def test_more_than_all_places_is_all_places(crowd_of: Callable[[int, int], Crowd]) -> None:
    crowd = crowd_of(2, 1)
    await crowd.come("a0", size=16)
    await crowd.come("b0")
    assert crowd.begun == ["a0"]
    crowd.queue.leave("a", 16)
    await settle()
    assert crowd.begun == ["a0", "b0"]


async def test_who_gives_up_leaves_no_place_behind(crowd_of: Callable[[int, int], Crowd]) -> None:
    crowd = crowd_of(1, 100)
    await crowd.come("a0", "b0", "c0")
    crowd.tasks["b0"].cancel()
    await settle()
    assert crowd.queue.num_waiting == 1
    crowd.queue.leave("a")
    # It was given the place, and gives up before it knows.
    crowd.tasks["c0"].cancel()
    await settle()
    await crowd.come("d0")
    assert crowd.begun == ["a0", "d0"]


async def test_a_closed_queue_refuses_all(crowd_of: Callable[[int, int], Crowd]) -> None:
    crowd = crowd_of(1, 100)
    await crowd.come("a0", "b0")
    crowd.queue.close()
    await crowd.come("c0")
    assert crowd.refused == ["b0", "c0"]


async def test_the_last_places_are_for_tenants_that_hold_none() -> None:
    crowd = Crowd(FairQueue(4, 100, num_reserved=1))
    await crowd.come(*(f"a{number}" for number in range(6)))
    assert crowd.begun == ["a0", "a1", "a2"]
    await crowd.come("b0", "b1")
    assert crowd.begun == ["a0", "a1", "a2", "b0"]
    # A place that comes free is kept as long as everyone who waits has one.
    await crowd.go("a0")
    assert crowd.begun[4:] == []
    await crowd.go("a1")
    assert crowd.begun[4:] == ["a3"]


async def test_who_holds_more_leaves_more_free() -> None:
    crowd = Crowd(FairQueue(8, 100, num_reserved=3))
    await crowd.come(*(f"a{number}" for number in range(8)))
    assert len(crowd.begun) == 5
    await crowd.come("b0", "b1", "b2")
    assert crowd.begun[5:] == ["b0", "b1"]
    await crowd.come("c0")
    assert crowd.begun[7:] == ["c0"]


async def test_a_large_request_of_a_tenant_that_holds_places_waits_until_it_fits() -> None:
    crowd = Crowd(FairQueue(4, 100, num_reserved=1))
    await crowd.come("a0")
    await crowd.come("a1", size=4)
    assert crowd.begun == ["a0"]
    await crowd.go("a0")
    assert crowd.begun == ["a0", "a1"]


async def test_a_client_that_leaves_as_a_place_comes_free_costs_nobody_a_place() -> None:
    """Its task hears of it one turn of the loop after its place was given up."""
    crowd = Crowd(FairQueue(1, 100))
    await crowd.come("a0", "b0", "c0")
    crowd.tasks["b0"].cancel()
    crowd.queue.leave("a")
    await settle()
    assert crowd.begun == ["a0", "c0"]
    await crowd.go("c0")
    await crowd.come("d0")
    assert crowd.begun == ["a0", "c0", "d0"]


async def test_a_client_that_leaves_as_the_queue_closes_or_fills_harms_nobody() -> None:
    crowd = Crowd(FairQueue(1, 2))
    await crowd.come("a0", "b0", "b1")
    crowd.tasks["b1"].cancel()
    entering = asyncio.ensure_future(crowd.queue.enter("c"))
    await settle()
    assert (crowd.refused, crowd.queue.num_waiting) == ([], 2)
    crowd.tasks["b0"].cancel()
    crowd.queue.close()
    with pytest.raises(Closed):
        await entering
