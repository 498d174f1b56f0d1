"""Commands of a launch end with it, and say how they ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from opd.cluster.flag_check import REPOSITORY
from opd.cluster.launching.held import Held, run_to_end

SLEEP = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def hold(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "opd.cluster.launching.hold", "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def below(process: subprocess.Popen[str]) -> psutil.Process:
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


def test_command_ends_when_nobody_holds_its_input_any_more() -> None:
    with hold(SLEEP) as process:
        child = below(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_command_ends_when_its_holder_is_told_to() -> None:
    with hold(SLEEP) as process:
        child = below(process)
        process.terminate()
        process.wait(timeout=60)
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_status_is_that_of_the_command() -> None:
    with hold("raise SystemExit(3)") as process:
        assert process.wait(timeout=60) == 3


async def test_held_command_is_logged_and_stopped(tmp_path: Path) -> None:
    held = Held("sleeper", [sys.executable, "-c", SLEEP], tmp_path / "log")
    await held.start()
    while not (tmp_path / "log").read_text().strip():
        assert held.status is None
    child = psutil.Process(int((tmp_path / "log").read_text()))
    await held.stop()
    assert held.status is not None
    assert psutil.wait_procs([child], timeout=30)[1] == []


async def test_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    held = Held(
        "job", [sys.executable, "-c", "raise SystemExit('out of memory')"], tmp_path / "log"
    )
    await held.start()
    assert await held.wait() == 1
    assert "job ended; the end of" in str(held.failure("ended"))
    assert "out of memory" in str(held.failure("ended"))


async def test_short_command_gives_status_and_output_or_runs_out_of_time() -> None:
    assert await run_to_end([sys.executable, "-c", "print('x')"], 60) == (0, "x\n")
    assert await run_to_end([sys.executable, "-c", SLEEP], 0.5) == (124, "")
