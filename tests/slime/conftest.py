"""Tests with a real slime: `SLIME_ROOT=CHECKOUT pytest -m slime`, in an environment that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STUBS = Path(__file__).with_name("stubs")


@pytest.fixture(scope="session")
def slime_root() -> Path:
    """slime's source tree; skips the test where there is none."""
    value = os.environ.get("SLIME_ROOT")
    if not value:
        pytest.skip("no slime: set SLIME_ROOT to a checkout, and run in an environment that has it")
    root = Path(value)
    if not (root / "slime" / "ray" / "rollout.py").is_file():
        pytest.skip(f"no slime: SLIME_ROOT={root} is not a slime checkout")
    return root


@pytest.fixture(scope="session")
def run_in_slime(slime_root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with slime, this tree and, where sglang is not installed, stubs of it."""

    def run(
        *arguments: str, cwd: Path = REPOSITORY, timeout_s: float = 840, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": python_path(slime_root), **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done

    return run


def python_path(slime_root: Path) -> str:
    """PYTHONPATH of processes that load slime."""
    # Behind everything installed would be better, but PYTHONPATH always comes first.
    stubs = [] if _has_sglang() else [str(STUBS)]
    return os.pathsep.join([str(slime_root), str(REPOSITORY), *stubs])


def _has_sglang() -> bool:
    code = "import sglang.srt.server_args"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
