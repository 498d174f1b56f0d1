"""`opd serve` as a user types it: an endpoint that answers, records, judges, and stops cleanly."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from httpx import AsyncClient
from openai import AsyncOpenAI

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from examples.tool_lab.run_lab import MODEL
from opd.processes.supervisor import free_ports
from opd.run import config as run_config
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.records.looking import votes_of

ROOT = Path(__file__).parents[2]
MAX_CPU = 2.7
"""Processor time until requests are answered, in loads of an engine's code: 1.9. With everything
started first it is 2.4 times as much. Seconds differ from machine to machine."""


def engine_load_s() -> float:
    """Processor seconds that loading the engine's code takes here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import rollout_bridge.embedded.engine"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def started(port: int, folder: Path) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "opd.cli.app", "serve", "--model", str(MODEL)],
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


async def test_serve_answers_before_it_has_started_learning_records_judges_and_stops(
    tmp_path: Path,
) -> None:
    port = free_ports(1)[0]
    # What an earlier program left: others may read it.
    tmp_path.chmod(0o755)
    (tmp_path / ".run-lock").touch(mode=0o644)
    (tmp_path / "report.html").write_text("old")
    process = await started(port, tmp_path)
    try:
        serve = psutil.Process(process.pid)
        times = [one.cpu_times() for one in (serve, *serve.children(recursive=True))]
        used = sum(time.user + time.system for time in times)
        load_s = await asyncio.to_thread(engine_load_s)
        print(f"answers after {used:.1f} s of processor time; an engine's code: {load_s:.1f} s")
        assert used <= MAX_CPU * load_s
        turn_id, replies = await converse(port)
        assert process.stdout is not None
        async with asyncio.timeout(120):
            said = await process.stdout.readline()
        assert said.startswith(b"learning: ")
        assert (tmp_path / "calibration.json").exists()
        await check_what_is_recorded(tmp_path, turn_id, replies)
        await check_that_engines_want_the_runs_key(tmp_path)
        await check_that_an_order_to_stop_ends_no_process(tmp_path, serve)
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert b"stopped" in await process.stdout.read()
    report = (tmp_path / "report.html").read_text()
    assert "The judge read what followed 1 answer." in report
    assert "No step has trained yet." in report
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert sum(summary["turns"].values()) == 2
    paths = [tmp_path, *tmp_path.rglob("*")]
    assert len(paths) > 10
    readable = [path for path in paths if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert readable == []


async def converse(port: int) -> tuple[str, list[Any]]:
    """Two requests; the id of the first one's turn, and the messages that followed its answer."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "What is the weather in Karo?"},
    ]
    tools: Any = TOOLS
    address = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=address, api_key="any", max_retries=0) as client:
        first = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        answer = first.choices[0].message.model_dump(exclude_none=True)
        calls = answer.get("tool_calls", [])
        replies: list[Any] = [
            {"role": "tool", "tool_call_id": call["id"], "content": '{"error": "no city"}'}
            for call in calls
        ] or [{"role": "user", "content": "I wanted Celsius."}]
        messages = [*messages, answer, *replies]
        await client.chat.completions.create(model="policy", messages=messages, tools=tools)
    return first.id.removeprefix("chatcmpl-"), replies


async def check_what_is_recorded(folder: Path, turn_id: str, replies: list[Any]) -> None:
    store_config = StoreConfig(url=f"sqlite:///{folder / 'records.db'}")
    async with await Store.open(store_config) as store, asyncio.timeout(60):
        (turn,) = await store.turns([turn_id])
        assert [message["role"] for message in turn.next_state] == [
            message["role"] for message in replies
        ]
        while not await votes_of(store, turn.turn_id):
            await asyncio.sleep(0.1)
        assert (await store.counts())[TurnState.AWAITING_NEXT_STATE] == 1


async def check_that_an_order_to_stop_ends_no_process(folder: Path, serve: psutil.Process) -> None:
    """Neither serving nor the trainer's process."""
    [trainer] = [one for one in serve.children() if "train" in one.cmdline()]
    order = folder / "order"
    order.touch(mode=0o600)
    order.write_text("enough for today")
    order.rename(folder / "stop")
    log = folder / "logs" / "trainer.log"
    async with asyncio.timeout(30):
        while "training has stopped: enough for today" not in log.read_text():
            await asyncio.sleep(0.1)
    await asyncio.sleep(3)
    assert trainer.is_running()
    assert trainer.status() != psutil.STATUS_ZOMBIE


async def check_that_engines_want_the_runs_key(folder: Path) -> None:
    key = (folder / "engine.key").read_text().strip()
    config = run_config.load(folder / "config.toml")
    assert key not in (folder / "config.toml").read_text()
    commands = [
        path.read_bytes().replace(b"\0", b" ").decode()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists()
    ]
    assert sum(str(folder) in command for command in commands) >= 5
    assert not any(key in command for command in commands)
    for engine in (config.policy, config.frozen):
        async with AsyncClient(base_url=engine.base_url) as http:
            for path in ("/pause_generation", "/update_weights_from_disk", "/generate"):
                assert (await http.post(path, json={})).status_code == 401
            assert (await http.get("/server_info")).status_code == 401
            told = await http.get("/server_info", headers={"authorization": f"Bearer {key}"})
            assert told.status_code == 200
            assert key not in told.text
