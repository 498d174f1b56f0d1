"""Warnings of a run's processes reach the terminal of the command that started them."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from api_proxy.server import request_ids
from opd.processes.beginning import LOG_FORMAT
from opd.processes.serving import say_how_it_stands
from opd.rehearsal.saying import LearningLine
from opd.report.terminal.log_notices import AGAIN_AFTER_S, LogNotices, notices_said
from opd.report.terminal.progress import ProgressBar
from records.store import Store
from tests.records.new_store import new_store


def line(level: str, name: str, text: str) -> str:
    return f"2026-11-24 14:06:07,351 {level} {name}: {text}\n"


def write(folder: Path, name: str, *lines: str) -> None:
    with (folder / f"{name}.log").open("a") as file:
        file.write("".join(lines))


def test_new_warnings_of_the_product_are_told_once(tmp_path: Path) -> None:
    write(tmp_path, "trainer", line("WARNING", "trainer.step.loop", "before it looked"))
    notices = LogNotices(tmp_path)
    assert notices.new() == []
    write(
        tmp_path,
        "judge",
        line("WARNING", "opd.rehearsal.worker", "rehearsal waits 1.0 s: judge: refused"),
        line("WARNING", "urllib3.connection", "of a library"),
        line("INFO", "trainer.step.loop", "no warning"),
        "Traceback: no line of a log\n",
        line("WARNING", "opd.rehearsal.worker", "rehearsal waits 2.0 s: judge: refused"),
    )
    write(tmp_path, "trainer", line("WARNING", "trainer.step.update", "a step of turns alone"))
    write(tmp_path, "proxy", line("ERROR", "rollout_bridge.worker", "unavailable, turns are kept"))
    assert notices.new() == [
        "proxy: unavailable, turns are kept",
        "trainer: a step of turns alone",
        "judge: rehearsal waits 2.0 s: judge: refused (2 times)",
    ]
    assert notices.new() == []


def test_what_goes_on_is_told_again_only_after_a_while(tmp_path: Path) -> None:
    now = 0.0
    notices = LogNotices(tmp_path, clock=lambda: now)

    def warn(session: str, number: int) -> None:
        text = f"every turn of session {session} was dropped: stale, {number}"
        write(tmp_path, "proxy", line("WARNING", "api_proxy.recording", text))

    warn("unit-ab", 3)
    assert notices.new() == ["proxy: every turn of session unit-ab was dropped: stale, 3"]
    for minute in (1, 2):
        now = 60.0 * minute
        warn("order-cd", 4 + minute)
        assert notices.new() == []
    now = AGAIN_AFTER_S
    expected = "proxy: every turn of session order-cd was dropped: stale, 6 (2 times)"
    assert notices.new() == [expected]


def test_what_several_workers_of_the_endpoint_say_is_one_line(tmp_path: Path) -> None:
    notices = LogNotices(tmp_path)
    said = "[req_0a] limit 'queue' reached: 3 refused"
    for name, number in (("proxy", 1), ("proxy.2", 2), ("proxy.10", 10)):
        write(tmp_path, name, line("WARNING", "api_proxy.server", f"[worker {number}] {said}"))
    assert notices.new() == ["proxy: limit 'queue' reached: 3 refused (3 times)"]
    assert notices.new() == []


def test_what_is_being_written_is_told_when_it_is_whole(tmp_path: Path) -> None:
    notices = LogNotices(tmp_path)
    whole = line("WARNING", "trainer.step.loop", "step 3: too few tokens")
    write(tmp_path, "trainer", whole[:50])
    assert notices.new() == []
    write(tmp_path, "trainer", whole[50:])
    assert notices.new() == ["trainer: step 3: too few tokens"]


def test_many_kinds_are_cut_and_said_to_be(tmp_path: Path) -> None:
    notices = LogNotices(tmp_path)
    for letter in "abcdefg":
        write(tmp_path, "trainer", line("ERROR", "trainer.step.loop", f"failure {letter}"))
    assert notices.new()[-1] == f"and 2 other warnings: see {tmp_path}"


@pytest.mark.parametrize("name", ["trainer.step.update", "opd.rehearsal.worker"])
async def test_serve_prints_them_as_the_processes_log_them(tmp_path: Path, name: str) -> None:
    """In the very form that `opd.processes.beginning` gives a log."""
    told = io.StringIO()
    notices, console = LogNotices(tmp_path), Console(file=told, width=200)
    handler = logging.FileHandler(tmp_path / "trainer.log")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    handler.addFilter(request_ids.mark)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        logger.warning("training waits for the measurement of version %d [1, 2]", 3)
    finally:
        logger.removeHandler(handler)
        handler.close()
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        await say_how_it_stands(store, LearningLine(store, tmp_path), notices, console)
    text = told.getvalue()
    assert "trainer: training waits for the measurement of version 3 [1, 2]" in text


async def test_the_health_of_rollout_correction_is_said_as_it_comes(tmp_path: Path) -> None:
    """While a lab or a replay trains, above its progress bars, and what is left at the end."""
    told = io.StringIO()
    console = Console(file=told, width=200)
    warning = "step 3: rollout_corr/kl_fresh = 0.51: trainer and rollout engine are far apart"
    with ProgressBar(console, "learning", "updates", 9):
        async with notices_said(console, tmp_path, every_s=0.01):
            write(tmp_path, "trainer", line("WARNING", "trainer.step.loop", warning))
            async with asyncio.timeout(30):
                while warning not in told.getvalue():
                    await asyncio.sleep(0.01)
        before = told.getvalue()
        async with notices_said(console, tmp_path, every_s=60.0):
            assert told.getvalue() == before
            write(tmp_path, "trainer", line("WARNING", "trainer.step.loop", "step 4: [red]odd"))
        assert told.getvalue().removeprefix(before) == "trainer: step 4: [red]odd\n"
