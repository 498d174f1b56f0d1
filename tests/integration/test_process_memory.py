"""The endpoint and the judge are small processes: idle, with the lab's model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from opd.run import config as run_config
from opd.run.defaults import ENGINE_KEY, resolve, single_machine
from records.store import Store
from rollout_bridge.engine.keys import ensure_key_file
from tests.examples.shipped import MODEL

ROOT = Path(__file__).parents[2]
MAX_PSS = 120 * 2**20
SETTLED_S = 3.0
HEAVY = {"torch", "transformers", "peft", "pandas", "pyarrow", "matplotlib"}
START = """
import sys, opd.cli.app
from pathlib import Path
from opd.processes.roles import judge_role, proxy_role
role = judge_role if sys.argv[1] == "run_judge" else proxy_role
getattr(role, sys.argv[1])(Path(sys.argv[2]), [], False)
"""


@contextmanager
def started(function: str, folder: Path) -> Iterator[tuple[psutil.Process, set[str]]]:
    """The process once it loads nothing more, and the packages that it has loaded."""
    config = folder / "config.toml"
    run_config.save(resolve(single_machine(str(MODEL), folder), None, ["proxy.port=0"]), config)
    ensure_key_file(folder / ENGINE_KEY)
    asyncio.run(_as_serve_does(config))
    log = folder / "log"
    with (
        log.open("wb") as written,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", "-c", START, function, str(config)],
            cwd=ROOT,
            stderr=written,
            stdout=written,
        ) as process,
    ):
        try:
            last = ("rollout_bridge.scoring.scoring", "judge.worker")
            if function == "run_proxy":
                last = ("rollout_bridge.engine.client", "api_proxy.server.server")
            loaded = _loaded(process, log, last)
            yield psutil.Process(process.pid), loaded
        finally:
            process.terminate()


async def _as_serve_does(config: Path) -> None:
    """Open the store once: whoever opens a new one first loads what makes its tables."""
    async with await Store.open(run_config.load(config).store):
        pass


def _loaded(process: subprocess.Popen[bytes], log: Path, last: tuple[str, ...]) -> set[str]:
    deadline, size, since = time.monotonic() + 120, -1, time.monotonic()
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        names = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines()}
        if names.issuperset(last) and time.monotonic() - since > SETTLED_S:
            return {name.partition(".")[0] for name in names}
        time.sleep(0.2)
    raise AssertionError("still loading")


@pytest.mark.parametrize("function", ["run_proxy", "run_judge"])
def test_an_idle_process_is_small_and_loads_no_model_library(function: str, tmp_path: Path) -> None:
    with started(function, tmp_path) as (process, loaded):
        assert loaded & HEAVY == set()
        used = process.memory_full_info().pss
        print(f"{function}: {used / 2**20:.0f} MB PSS")
        assert used <= MAX_PSS
