"""An embedded engine in a process of its own, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]


@contextmanager
def embedded_engine(model: Path, *arguments: str) -> Iterator[str]:
    """Start it, yield its address, stop it."""
    with engine_process(model, *arguments) as (_, url):
        yield url


@contextmanager
def engine_process(
    model: Path, *arguments: str, errors: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The same, for tests that do things to the process. `errors` takes its standard error."""
    command = [sys.executable, "-m", "rollout_bridge.embedded", "--model", str(model), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the engine did not start; see its standard error"
            yield process, f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
