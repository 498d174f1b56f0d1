"""`opd replay --into RUN`: a run that serves agents takes recorded turns up, live ones first.

Engines, endpoint, judge and trainer are processes of their own, as is the command. Judge and
trainer start when live and recorded turns wait for them, so that what they take first is told.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from examples.tool_lab.run_lab import LAB_VALUES, MODEL
from opd.processes.run import Run
from opd.run.config import RunConfig, merge
from opd.run.defaults import resolve, single_machine
from records.names import TurnState
from records.store import Store
from tests.opd.replay.recording_files import lab_recordings

ROOT = Path(__file__).parents[2]
YES = "It shows.\n\\boxed{1}\n[HINT_START]\nGive temperatures in Celsius.\n[HINT_END]"
NO = "It does not.\n\\boxed{-1}"
COMPLAINT = "I want degrees in Celsius, not Fahrenheit."
RECORDED = ("Karo", "Pelin", "Ilm")
WITHOUT_VOTES = "Ilm"
LIVE = ("Tessa", "Oren", "Milu")
ENDED = (TurnState.TRAINED, TurnState.DROPPED)


def configuration(folder: Path) -> RunConfig:
    values = merge(single_machine(str(MODEL), folder), LAB_VALUES)
    # One turn at a time, and one a step: the order in which turns are taken shows.
    own = {
        "proxy": {"port": 0},
        "judge": {"loop": {"concurrency": 1}},
        "scoring": {"loop": {"concurrency": 1}},
        "trainer": {"rollout_batch_size": 1, "max_staleness": 1000, "tensorboard": False},
        "replay": {"held_out": 0.0},
    }
    return resolve(merge(values, own), None, [])


@asynccontextmanager
async def started(*arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command runs; it does not outlive the test."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "opd.cli.app", "replay", *map(str, arguments)],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process) -> str:
    """All that a command prints until it ends."""
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return " ".join(output.decode().split())


async def converse(client: AsyncOpenAI, city: str) -> None:
    """A user who asks, gets an answer, and is not content. Raises if a request fails."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"What is the weather in {city}?"},
    ]
    tools: Any = TOOLS
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        answer = reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(answer)
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": '{"temp_c": 21, "temp_f": 70, "sky": "sun"}',
            }
            for call in answer.get("tool_calls", [])
        ]
        messages += results or [{"role": "user", "content": COMPLAINT}]


async def until(store: Store, seconds: float, *states: TurnState) -> None:
    """No turn is in one of these states any more."""
    async with asyncio.timeout(seconds):
        while sum(map((await store.counts()).__getitem__, states)):
            await asyncio.sleep(0.1)


def rows(folder: Path, query: str, *values: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder / 'records.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(query, values).fetchall()


def everything(folder: Path) -> dict[str, list[Any]]:
    """Every row of every table."""
    names = rows(folder, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name: sorted(rows(folder, f"SELECT * FROM {name}"), key=repr) for (name,) in names}


def judged(folder: Path) -> list[int]:
    """The priorities of turns (0: live, 1: recorded) in the order of their verdicts."""
    query = "SELECT priority FROM turns JOIN verdicts USING (turn_id) ORDER BY verdicts.created_at"
    return [priority for (priority,) in rows(folder, query)]


def of_state(folder: Path, state: str) -> list[tuple[str, int]]:
    """Turn ids with their priorities, in the order of the versions that they trained."""
    query = "SELECT turn_id, priority FROM turns WHERE state = ? ORDER BY trained_version"
    return rows(folder, query, state)


@pytest.mark.learning
@pytest.mark.timeout(600)
async def test_recorded_turns_are_taken_up_when_no_live_turn_waits(tmp_path: Path) -> None:
    config, folder = configuration(tmp_path / "run"), tmp_path / "run"
    sessions, votes = lab_recordings(tmp_path, RECORDED, [YES, NO, YES])
    lines = votes.read_text(encoding="utf-8").splitlines(keepends=True)
    votes.write_text("".join(line for line in lines if WITHOUT_VOTES not in line), encoding="utf-8")
    command = (sessions, "--votes", votes, "--into", folder)
    base_url = f"http://{config.proxy.host}:{config.proxy.port}/v1"
    folder.mkdir()
    async with (
        Run(config, folder) as run,
        await Store.open(config.store) as store,
        AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client,
        AsyncExitStack() as stack,
    ):
        await run.start_engines()
        await run.start_proxy()
        process = await stack.enter_async_context(started(*command))
        async with asyncio.timeout(120):
            while len(rows(folder, "SELECT 1 FROM recordings WHERE votes IS NOT NULL")) < 6:
                await asyncio.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output = await said(process)
        assert process.returncode == 130, output
        assert "9 of 9 turns" in output
        assert "votes on 6 turns" in output
        assert "the run has all turns" in output
        assert "Traceback" not in output
        assert (await store.replay_status()).states[TurnState.JUDGING] == 9

        again = await stack.enter_async_context(started(*command))
        await asyncio.gather(*(converse(client, city) for city in LIVE))
        counts = await store.counts()
        assert counts[TurnState.JUDGING] == 9 + 2 * len(LIVE)
        await run.start_judge()
        await converse(client, "Sora")
        await until(store, 240, TurnState.JUDGING, TurnState.SCORING)
        output = await said(again)
        assert again.returncode == 0, output
        assert "handed over 9 of 9 turns, 0 new" in output
        assert "of 9 recorded turns in this run 9 are judged" in output
        priorities = judged(folder)
        assert priorities[: 2 * len(LIVE)] == [0] * 2 * len(LIVE)
        assert priorities.count(1) == 9

        waiting_live = {turn for turn, priority in of_state(folder, "ready") if priority == 0}
        assert waiting_live
        await run.start_trainer()
        await converse(client, "Vask")
        await until(store, 240, *set(TurnState) - {*ENDED, TurnState.AWAITING_NEXT_STATE})
        status = await store.replay_status()
        assert sum(status.states[state] for state in ENDED) == status.num_recorded == 9
        assert sum(status.drops.values()) == status.states[TurnState.DROPPED]
        assert status.num_trained >= 6
        order = dict(of_state(folder, "trained"))
        taken = [turn for turn, priority in order.items() if priority == 1 or turn in waiting_live]
        assert [order[turn] for turn in taken] == sorted(order[turn] for turn in taken)

        await run.supervisor.stop("judge", "trainer")
        before = everything(folder)
        process = await stack.enter_async_context(started(*command))
        output = await said(process)
        assert process.returncode == 0, output
        assert "0 new" in output
        assert "votes on 6 turns, 0 of them new" in output
        assert everything(folder) == before
