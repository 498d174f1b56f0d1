"""`opd serve` as a user types it: an endpoint that answers, records, judges, and stops cleanly."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from openai import AsyncOpenAI

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from examples.tool_lab.run_lab import MODEL
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from trainer.supervisor import free_ports

ROOT = Path(__file__).parents[2]


async def started(port: int, folder: Path) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "trainer.cli", "serve", "--model", str(MODEL)],
        *["--run", str(folder), "--port", str(port), "--set", "judge.max_tokens=48"],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    seen = b""
    async with asyncio.timeout(120):
        while b"Ctrl-C" not in seen:
            line = await process.stdout.readline()
            assert line, f"serve ended: {seen.decode()}"
            seen += line
    return process


async def test_serve_answers_records_judges_and_stops(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    process = await started(port, tmp_path)
    store_config = StoreConfig(url=f"sqlite:///{tmp_path / 'records.db'}")
    try:
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "What is the weather in Karo?"},
        ]
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0
        ) as client:
            first = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            answer = first.choices[0].message.model_dump(exclude_none=True)
            calls = answer.get("tool_calls", [])
            replies = [
                {"role": "tool", "tool_call_id": call["id"], "content": '{"error": "no city"}'}
                for call in calls
            ] or [{"role": "user", "content": "I wanted Celsius."}]
            await client.chat.completions.create(
                model="policy", messages=[*messages, answer, *replies], tools=TOOLS
            )
        async with await Store.open(store_config) as store, asyncio.timeout(60):
            (turn,) = await store.turns([first.id.removeprefix("chatcmpl-")])
            assert [message["role"] for message in turn.next_state] == [
                message["role"] for message in replies
            ]
            while not await store.votes_of(turn.turn_id):
                await asyncio.sleep(0.1)
            assert (await store.counts())[TurnState.AWAITING_NEXT_STATE] == 1
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert process.stdout is not None
    assert b"stopped" in await process.stdout.read()
    assert "Mean importance weight" in (tmp_path / "report.html").read_text()
