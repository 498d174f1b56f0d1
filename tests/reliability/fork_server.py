"""Starts victims of the crash tests by fork, from a process that has imported what they import.

    python -m tests.reliability.fork_server

Imports are most of what a start costs, and have nothing to do with what a crash can break. A child
runs the command line of `opd` in a session of its own, with its own log, and a standard input that
ends when this process does; it knows nothing of the others. Requests come as lines of JSON with
`arguments`, `log` and `fail_point` (null for none). Lines go back: `started PID` for each request,
`ended PID STATUS` for each child, where a signal is a negative status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

from records.database import fail_points

PRELOADED = (
    "opd.cli.app",
    "opd.processes.roles.judge_role",
    "opd.processes.roles.proxy_role",
    "opd.processes.roles.trainer_role",
    "trainer.step.loop",
    "rollout_bridge.rendering.calibration_texts",
    "opd.replay.work",
    "api_proxy.app",
    "api_proxy.server.server",
    "judge.worker",
    "rollout_bridge.scoring.scoring",
    "rollout_bridge.engine.client",
    "rollout_bridge.rendering.rendering",
    "alembic.command",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "torch._dynamo",
    "uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "renderers.qwen3",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def main() -> None:
    """Serve requests until standard input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    parent_lives = os.pipe()
    signal.signal(signal.SIGCHLD, lambda *_: _report_ended())
    _say("ready")
    for line in iter(sys.stdin.readline, ""):
        _start(json.loads(line), *parent_lives)


def _start(request: dict[str, Any], is_read: int, is_held: int) -> None:
    # The end of a child that dies at once is told after its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        os.close(is_held)
        _become(request, is_read)
    _say(f"started {pid}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _become(request: dict[str, Any], stdin: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # Read when the module was imported, which was long ago: see records/database/fail_points.py.
    fail_points.ARMED = fail_points.parse(request["fail_point"])
    if request["fail_point"] is not None:  # for the processes that it starts itself
        os.environ[fail_points.VARIABLE] = request["fail_point"]
    sys.argv = ["opd", *request["arguments"]]
    from opd.cli.app import app

    app()
    sys.exit(0)


def _report_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
