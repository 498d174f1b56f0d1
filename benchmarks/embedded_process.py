"""The embedded engine in a process of its own, for benchmarks that use it over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def embedded_engine(model: str, *options: str) -> Iterator[str]:
    """Start it with further command line options, yield its address, stop it."""
    command = [sys.executable, "-m", "rollout_bridge.embedded", "--model", model, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the engine did not start")
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.terminate()
