"""`./run.sh clients [NAME...] [--short]`: installs the foreign clients and runs their suites."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.serving import WORKERS

HERE = Path(__file__).parent
AGENTS = "test_python_agents.py"
SUITES: dict[str, tuple[str, str, str]] = {
    "langchain": ("python", "test_langchain_standard.py", ""),
    "codex": ("node", "test_codex.py", ""),
    "claude-code": ("node", "test_claude_code.py", ""),
    "crewai": ("python", AGENTS, "crewai"),
    "litellm": ("python", AGENTS, "litellm"),
    "autogen": ("python", AGENTS, "autogen"),
    "langgraph": ("python", AGENTS, "langgraph"),
    "vercel": ("node", "test_vercel.py", ""),
    "sglang": ("", "test_sglang.py", ""),
}
"""Name -> what it needs to be installed, its file, and which of the file's tests."""
LONG = {"sglang"}
"""Suites that take minutes: --short leaves them out."""
SHORT_TESTS = "not (responses or messages)"
"""Of an agent with several doors, its chat completions."""


def main() -> int:
    """The exit status of the first suite that fails, else 0."""
    parser = argparse.ArgumentParser(prog="./run.sh clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(SUITES)}")
    parser.add_argument(
        "--short",
        action="store_true",
        help="one door of each agent, and nothing that takes minutes",
    )
    parser.add_argument("--workers", type=int, default=1, help="workers of the endpoint")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - SUITES.keys())
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(SUITES)}")
    names = given.names or [name for name in SUITES if not (given.short and name in LONG)]
    parts = sorted({SUITES[name][0] for name in names} - {""})
    if parts:
        installed = subprocess.run([HERE / "install.sh", *parts])
        if installed.returncode:
            return installed.returncode
    statuses = [run_suite(name, given.short, given.workers) for name in names]
    return next((status for status in statuses if status), 0)


def run_suite(name: str, is_short: bool, workers: int) -> int:
    """pytest's exit status."""
    _, file, words = SUITES[name]
    wanted = [f"({text})" for text in (words, SHORT_TESTS if is_short else "") if text]
    print(f"\n== {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", str(HERE / "suites" / file)]
    if wanted:
        command += ["-k", " and ".join(wanted)]
    asked = {"OPD_CLIENTS": "1", WORKERS: str(workers)}
    return subprocess.run(command, env=os.environ | asked).returncode


if __name__ == "__main__":
    sys.exit(main())
