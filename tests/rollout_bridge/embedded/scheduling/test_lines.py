"""Live requests first, in an engine that judges and teaches too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_bridge.embedded.scheduling.lines import BackgroundTime, Line
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from rollout_bridge.engine.types import SPARE_PRIORITY
from tests.contract import tiny_model
from tests.rollout_bridge.embedded.test_engine import complete, started


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"), 0)


def request(first: int, new: int = 4, length: int = 40, **options) -> EngineRequest:
    ids = [first, *range(20, 19 + length)]
    return EngineRequest(input_ids=ids, sampling=Sampling(max_new_tokens=new), **options)


def scored(first: int) -> EngineRequest:
    return request(first, 0, 300, score_from=1)


def test_background_work_gets_its_share_and_all_of_it_alone() -> None:
    time = BackgroundTime(share=0.25)
    assert time.may_begin(is_contended=True)
    time.took(live_s=0.0, background_s=1.0)
    time.took(live_s=2.0, background_s=0.0)
    assert not time.may_begin(is_contended=True)
    time.took(live_s=1.0, background_s=0.0)
    assert time.may_begin(is_contended=True)
    time.took(live_s=100.0, background_s=0.0)
    time.took(live_s=0.0, background_s=1.0)
    assert not time.may_begin(is_contended=True), "what was not used is not saved up"
    assert time.may_begin(is_contended=False)
    assert time.may_begin(is_contended=True), "nobody waits for what nobody wanted"


def test_a_line_loses_what_ends() -> None:
    line, one = Line(), request(1)
    line.waiting.append(one)
    line.remove(one)
    line.remove(one)
    assert line.requests == []


async def test_an_agent_that_comes_last_is_begun_first(model: Path) -> None:
    """Three votes wait for the row that a fourth holds; an agent's request passes them."""
    order: list[str] = []
    async with started(model, max_batch=1) as engine:
        finish = engine._scheduler._finish

        def noted(ended: EngineRequest, why) -> None:
            order.append(ended.rid)
            finish(ended, why)

        engine._scheduler._finish = noted  # type: ignore[method-assign]
        await engine.pause("retract")
        votes = [request(n, rid=f"vote {n}", priority=-1) for n in range(4)]
        agent = request(9, rid="agent")
        resumed = asyncio.create_task(asyncio.sleep(0.1))
        work = asyncio.create_task(complete(engine, *votes, agent))
        await resumed
        await engine.resume()
        await work
    assert order[0] == "agent"
    assert sorted(order[1:]) == [f"vote {n}" for n in range(4)]


async def test_scores_leave_agents_most_of_the_time_and_are_all_done(model: Path) -> None:
    steps: list[str] = []
    async with started(model, max_step_cost=2**15) as engine:
        rows = engine._scheduler._rows
        decode, advance = rows.decode, rows.advance

        def on_decode(*given):
            steps.append("decode")
            return decode(*given)

        def on_advance(long, cost):
            steps.append(f"piece {cost}")
            return advance(long, cost)

        rows.decode, rows.advance = on_decode, on_advance  # type: ignore[method-assign]
        agent = request(5, 150)
        agent.sampling = Sampling(max_new_tokens=150, stop_token_ids=frozenset())
        await complete(engine, agent, *(scored(n) for n in range(3)))
        during = steps[: len(steps) - steps[::-1].index("decode")]
    pieces = [one for one in during if one.startswith("piece")]
    assert {f"piece {2**15 // 4}"} == set(pieces[1:]), "smaller while an agent waits"
    # More than one decode step for each piece: pieces take longer than steps and come in turn.
    assert during.count("decode") > 2 * len(pieces)


async def test_the_last_rows_are_left_to_agents(model: Path) -> None:
    async with started(model, max_batch=4) as engine:
        agent = request(5, 200)
        votes = [request(n, 60, priority=-1) for n in range(6)]
        most = 0
        decode = engine._scheduler._rows.decode

        def on_decode(*given):
            nonlocal most
            if any(one is agent for one in engine._scheduler.running):
                most = max(most, len(engine._scheduler.running))
            return decode(*given)

        engine._scheduler._rows.decode = on_decode  # type: ignore[method-assign]
        await complete(engine, agent, *votes)
    assert most == 3


async def test_spare_requests_take_only_rows_that_nobody_else_needs(model: Path) -> None:
    """Three quarters of the rows alone; beside an agent, all but its own row together a quarter."""
    seen: dict[bool, int] = {True: 0, False: 0}
    async with started(model, max_batch=8) as engine:
        agent = request(5, 80)
        decode = engine._scheduler._rows.decode

        def on_decode(*given):
            running = engine._scheduler.running
            has_agent = any(one is agent for one in running)
            seen[has_agent] = max(seen[has_agent], len(running))
            return decode(*given)

        engine._scheduler._rows.decode = on_decode  # type: ignore[method-assign]
        spare = [request(n, 8, priority=SPARE_PRIORITY) for n in range(6, 50)]
        await engine.pause("retract")
        work = asyncio.create_task(complete(engine, agent, *spare))
        await asyncio.sleep(0.1)
        await engine.resume()
        await work
    assert seen == {True: 1 + 2, False: 6}
    assert all(len(one.output_ids) == 8 for one in spare)
