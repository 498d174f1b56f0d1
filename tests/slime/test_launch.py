"""A launch from beginning to end with a real Ray: everything but slime's training itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from opd.cluster.flag_check import REPOSITORY
from opd.processes.supervisor import free_ports
from opd.report.curves import metric_rows
from tests.contract.engine_process import embedded_engine
from tests.examples.shipped import MODEL
from tests.slime.test_launch_flags import megatron_root, sglang_site  # noqa: F401

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
PATIENCE_S = 600.0


class Launched:
    """A launch in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], run: Path, port: int):
        self.process = process
        self.run = run
        self.port = port

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.5)

    def text(self) -> str:
        return (self.run.parent / "launch.out").read_text()

    def everything(self) -> list[psutil.Process]:
        """The launch and all that it started; Ray's processes and the job hang below Ray's head."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def launched(
    slime_root: Path,
    megatron_root: Path,  # noqa: F811
    sglang_site: str,  # noqa: F811
    tmp_path: Path,
) -> Iterator[Launched]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray in this environment")
    tree = tmp_path / "slime"
    tree.mkdir()
    for path in slime_root.iterdir():
        (tree / path.name).symlink_to(path)
    (tree / "train_async.py").unlink()
    (tree / "train_async.py").symlink_to(HERE / "stand_in_job.py")
    python = tmp_path / "python3"
    words = [sys.executable, str(HERE / "cpu_python.py"), sglang_site, "0"]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    python.chmod(0o755)
    run = tmp_path / "run"
    proxy, head, dashboard, agent = free_ports(4, "0.0.0.0")
    with embedded_engine(MODEL, "--weight-version", "1") as engine:
        overrides = {
            "model": MODEL,
            "trainer.rollout_batch_size": 8,
            # The job stands in for train_async.py.
            "rehearsal.enabled": "false",
            "cluster.python": python,
            "cluster.slime_root": tree,
            "cluster.megatron_root": megatron_root,
            "cluster.actor.tensor_parallel": 1,
            "cluster.ray.port": head,
            "cluster.ray.dashboard_port": dashboard,
            "cluster.ray.agent_port": agent,
            "cluster.env": f"{{STAND_IN_ENGINE = '{engine}'}}",
            "proxy.port": proxy,
        }
        config = tmp_path / "cluster.toml"
        text = (REPOSITORY / "configs" / "qwen3_4b.toml").read_text()
        config.write_text(text.split("# From the model's config.json")[0])
        command = [sys.executable, "-m", "opd.cli.app", "slime", "--config", str(config)]
        for key, value in overrides.items():
            command += ["--set", f"{key}={value}"]
        with (tmp_path / "launch.out").open("w") as out:
            process = subprocess.Popen(
                [*command, "--run", str(run)], stdout=out, stderr=out, text=True, cwd=REPOSITORY
            )
        try:
            yield Launched(process, run, proxy)
        finally:
            process.terminate()
            process.wait(timeout=120)


def answer(port: int) -> str:
    """One turn of an agent."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]["finish_reason"]


def gone(processes: list[psutil.Process]) -> list[str]:
    """What is still alive of `processes` after the time that Ray takes to stop."""
    _, alive = psutil.wait_procs(processes, timeout=120)
    return [process.name() for process in alive]


def test_launch_serves_agents_until_the_job_is_done(launched: Launched) -> None:
    launched.until(lambda: "ready: point an OpenAI client" in launched.text())
    assert answer(launched.port) in ("stop", "length")
    started = launched.everything()
    assert any("raylet" in process.name() for process in started)
    (launched.run / "finish").write_text("0")
    assert launched.process.wait(timeout=180) == 0, launched.text()
    assert "the job is done" in launched.text()
    assert [row["loss"] for row in metric_rows(launched.run)] == [1.0, 0.5]
    assert f"report: {launched.run / 'report.html'}" in launched.text()
    assert gone(started) == []
    assert oct((launched.run / "ray_token").stat().st_mode & 0o777) == "0o600"
    with pytest.raises(urllib.error.URLError):
        answer(launched.port)


def test_launch_that_is_told_to_stop_ends_the_job_and_all_that_it_started(
    launched: Launched,
) -> None:
    launched.until(lambda: (launched.run / "job.pid").exists())
    job = psutil.Process(int((launched.run / "job.pid").read_text()))
    started = launched.everything()
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.process.wait(timeout=300) == 0, launched.text()
    assert gone([*started, job]) == []


def test_launch_reports_a_job_that_fails_with_the_end_of_its_log(launched: Launched) -> None:
    launched.until(lambda: (launched.run / "job.pid").exists())
    (launched.run / "finish").write_text("3")
    assert launched.process.wait(timeout=300) == 2
    assert "slime's job ended" in launched.text()
    assert "training" in launched.text()


def test_launch_that_is_killed_leaves_nothing_behind(launched: Launched) -> None:
    launched.until(lambda: (launched.run / "job.pid").exists())
    job = psutil.Process(int((launched.run / "job.pid").read_text()))
    started = launched.everything()
    launched.process.kill()
    assert gone([*started, job]) == []
