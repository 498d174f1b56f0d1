"""Starting and stopping SGLang, without SGLang: `./run.sh sglang` does it for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.sglang_cpu import server as sglang
from examples.sglang_cpu.check import other_weights, shortcomings
from examples.sglang_cpu.server import SglangServer
from tests.contract import tiny_model
from trainer.errors import StartupError

FINE = {"success_before": 0.2, "success_after": 0.4, "updates": 8, "policy_version": 8}
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
"""
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch):
    """Makes a script the launcher, in this environment."""

    def use(code: str) -> None:
        path = tmp_path / "launch.py"
        path.write_text(code)
        monkeypatch.setattr(sglang, "PYTHON", Path(sys.executable))
        monkeypatch.setattr(sglang, "LAUNCHER", path)

    return use


def test_a_server_that_ends_while_starting_says_why(launcher, tmp_path: Path) -> None:
    launcher("print('no such model'); raise SystemExit(3)")
    with (
        pytest.raises(StartupError, match=r"ended while starting(?s:.*)no such model"),
        SglangServer(tmp_path, tmp_path / "log"),
    ):
        pass


def test_a_server_that_answers_is_ready_and_stops_by_sigterm(launcher, tmp_path: Path) -> None:
    launcher(HEALTHY + "server.serve_forever()")
    with SglangServer(tmp_path, tmp_path / "log") as server:
        assert server.process.poll() is None
    assert server.process.returncode == -15


def test_a_server_that_does_not_stop_is_killed_with_its_children(
    launcher, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sglang, "STOP_S", 0.2)
    launcher(HEALTHY + STUBBORN + "server.serve_forever()")
    with SglangServer(tmp_path, tmp_path / "log") as server:
        child = int((tmp_path / "log").read_text().split()[1])
        os.kill(child, 0)
    assert server.process.returncode == -9
    assert _ended(child)


def test_without_sglang_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sglang, "PYTHON", tmp_path / "python")
    with pytest.raises(StartupError, match=r"\./run\.sh sglang installs"):
        SglangServer(tmp_path, tmp_path / "log")


def test_kernels_resolve_and_raise_by_name() -> None:
    code = """
import sys
sys.path.insert(0, "examples/sglang_cpu")
import launch
from sgl_kernel import silu_and_mul
from sgl_kernel.flash_attn import anything
"""
    # Submodules are no part of the package: what needs one finds out when it is imported.
    result = _python(code)
    assert "No module named 'sgl_kernel.flash_attn'" in result.stderr
    result = _python(code.replace("from sgl_kernel.flash_attn import anything", "silu_and_mul(1)"))
    assert "NotImplementedError: sgl_kernel.silu_and_mul is a CUDA kernel" in result.stderr


def test_a_good_run_has_no_shortcomings() -> None:
    assert shortcomings(FINE, 8) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success_after": 0.2}, "did not rise: 0.200 before, 0.200 after"),
        ({"updates": 7, "policy_version": 7}, "7 of 8 updates"),
        ({"policy_version": 2}, "version 2 is served after 8"),
    ],
)
def test_what_a_run_did_not_show_is_named(change: dict[str, float], message: str) -> None:
    (problem,) = shortcomings(FINE | change, 8)
    assert message in problem


def test_other_weights_are_of_the_same_shape_and_another_model(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = tiny_model.build(tmp_path / "model", 0)
    own = load_file(model / "model.safetensors")
    other = load_file(other_weights(model, tmp_path / "other") / "model.safetensors")
    assert {name: value.shape for name, value in own.items()} == {
        name: value.shape for name, value in other.items()
    }
    changed = [name for name in own if not (own[name] == other[name]).all()]
    assert any("embed" in name for name in changed)
    assert any("proj" in name for name in changed)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=sglang.ROOT, check=False
    )


def _ended(pid: int) -> bool:
    """Gone, or dead and not yet taken note of by whoever inherited it."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
