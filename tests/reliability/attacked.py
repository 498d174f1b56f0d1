"""Starts the proxy that is attacked (`attack_server`) and listens to its heart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

JSON = {"content-type": "application/json"}
LONGEST_S = 0.05
"""Of one callback in CPU time; on an idle machine also how late a beat may be."""
_NUM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacked:
    """A proxy in a process of its own."""

    port: int
    pid: int
    client: httpx.Client

    def heart(self) -> dict[str, Any]:
        """What its event loop felt since the last time."""
        return self.client.get("/test/heart").json()

    def metric(self, line: str) -> float:
        """A value of its metrics; 0 where it was never counted."""
        for found in self.client.get("/metrics").text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        return 0.0

    def wait_for_metric(self, line: str, least: float, patience_s: float = 60.0) -> float:
        """The metric once it is `least` or more."""
        deadline = time.monotonic() + patience_s
        while (value := self.metric(line)) < least and time.monotonic() < deadline:
            time.sleep(0.1)
        return value


def is_idle() -> bool:
    """Whether nothing else keeps this machine busy, so that times can be trusted."""
    return os.getloadavg()[0] < 0.4 * (os.cpu_count() or 1)


class HeldError(AssertionError):
    """The event loop was held for too long."""


def check_time(heart: dict[str, Any], name: str) -> None:
    """Raise HeldError if this time of the heart's is too long."""
    if heart[name] > LONGEST_S:
        raise HeldError(f"{name}: {heart}")


def up_to_three_times(attack: Callable[[], None]) -> None:
    """Attack until the loop is not held, three times at most; any other fault counts at once. The
    attack is the same each time: what holds the loop does so again. A full search for garbage, one
    in 700,000 new objects, and what another process took from this one do not.
    """
    for _ in range(_NUM_ATTEMPTS - 1):
        try:
            attack()
        except HeldError as error:
            print(f"again, after {error}")
        else:
            return
    attack()


@contextmanager
def attacked(folder: Path, **settings: Any) -> Iterator[Attacked]:
    """A proxy with these settings."""
    command = [sys.executable, "-m", "tests.reliability.attack_server", str(folder)]
    with subprocess.Popen(
        [*command, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, headers=JSON, timeout=300) as client:
                while True:
                    try:
                        client.get("/healthz")
                        break
                    except httpx.ConnectError:
                        time.sleep(0.1)
                yield Attacked(port=port, pid=process.pid, client=client)
        finally:
            process.terminate()
            process.wait(60)
