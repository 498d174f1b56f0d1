"""Engines of one teacher take turns, and one that is ill is left out for a while."""

from __future__ import annotations

import pytest

from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from rollout_bridge.scoring.replicas import ILL_S, Replicas


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Asked:
    """Answers with the engine's name, which it notes, unless the engine is `down`."""

    def __init__(self) -> None:
        self.engines: list[str] = []
        self.down: set[str] = set()

    async def __call__(self, engine: str) -> str:
        self.engines.append(engine)
        if engine in self.down:
            raise EngineUnavailable(f"{engine} is down")
        return engine


async def test_they_take_turns() -> None:
    replicas, ask = Replicas(["a", "b", "c"]), Asked()
    assert [await replicas.first(ask) for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert len(ask.engines) == 5


async def test_one_that_is_down_is_left_out_until_it_may_be_back() -> None:
    clock, ask = Clock(), Asked()
    replicas = Replicas(["a", "b"], now=clock)
    ask.down = {"a"}
    assert [await replicas.first(ask) for _ in range(4)] == ["b"] * 4
    assert ask.engines.count("a") == 1
    ask.down = set()
    clock.now += ILL_S + 1
    assert {await replicas.first(ask) for _ in range(2)} == {"a", "b"}


async def test_if_all_are_down_each_is_asked_and_the_last_ones_fault_is_raised() -> None:
    replicas, ask = Replicas(["a", "b"]), Asked()
    ask.down = {"a", "b"}
    for _ in range(2):
        ask.engines.clear()
        with pytest.raises(EngineUnavailable, match="is down"):
            await replicas.first(ask)
        assert sorted(ask.engines) == ["a", "b"]
    ask.down = set()
    assert await replicas.first(ask) in ("a", "b")


async def test_a_refusal_is_an_answer() -> None:
    async def refuse(engine: str) -> str:
        raise EngineRejected(400, f"{engine}: too long")

    with pytest.raises(EngineRejected, match="a: too long"):
        await Replicas(["a", "b"]).first(refuse)


def test_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no engine"):
        Replicas([])
