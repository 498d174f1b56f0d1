"""One SGLang server on this machine's CPU: started, waited for, stopped. Nothing else is touched.

The server is a process group of its own, so that stopping it reaches its scheduler and detokenizer
and no other process. If this process dies in whatever way, the server stops itself, because its
standard input closes (`launch.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from opd.processes.supervisor import free_ports, tail
from trainer.errors import StartupError

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
LAUNCHER = Path(__file__).with_name("launch.py")
START_S = 600.0
"""Half a minute on an idle core, most of it imports; minutes for two servers on busy ones. A server
that cannot start ends, which is noticed at once.
"""
STOP_S = 20.0

ARGUMENTS = (
    *("--device", "cpu"),
    # The trainer's precision: calibration compares the two.
    *("--dtype", "float32"),
    # What SGLang has in plain torch; every other backend needs kernels of sgl_kernel.
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
    # Otherwise the scheduler of an idle server keeps a core busy.
    "--sleep-on-idle",
    "--skip-server-warmup",
    # The label under which the run's first weights are published; servers call it "default".
    *("--weight-version", "0"),
    "--incremental-streaming-output",
    # Few at once: the contract also tests requests that wait for their turn.
    *("--max-total-tokens", "65536", "--max-running-requests", "16"),
)
ADAPTERS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "16"),
    *("--max-loras-per-batch", "4", "--lora-target-modules"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""For a policy server that serves adapters in addition to its base."""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread and no pinning: two servers, a trainer and the agents share a few cores.
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class SglangServer:
    """A server of `model` (a folder) on a port that the operating system chooses.

    The constructor starts it and returns at once; `wait_ready` waits. As a context manager it waits
    on entry and stops on exit. `arguments` are SGLang's and come last, so they take precedence.
    """

    def __init__(self, model: Path, log: Path, arguments: Sequence[str] = (), port: int = 0):
        if not PYTHON.exists():
            raise StartupError(f"{PYTHON}: no such file; ./run.sh sglang installs SGLang there")
        self.port = port or free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        command = [str(PYTHON), str(LAUNCHER), "--model-path", str(model.resolve()), *place]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *ARGUMENTS, *arguments, "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )

    def __enter__(self) -> SglangServer:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Return once it answers. Raises StartupError, with the end of its log, if it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartupError(f"SGLang ended while starting; {tail(self.log)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise StartupError(f"SGLang was not ready after {timeout_s:.0f} s; {tail(self.log)}")

    def stop(self) -> None:
        """SIGTERM, and after a while SIGKILL to those of its processes that are left."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_S)
                return
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and its children: what a crash looks like from outside."""
        # The group exists as long as its leader has not been waited for.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def sglang_servers(model: Path, logs: Path, *names: str) -> Iterator[tuple[SglangServer, ...]]:
    """A server for each name, started at the same time and stopped on exit; one named "policy"
    takes adapters. Raises StartupError.
    """
    with contextlib.ExitStack() as stack:
        servers = []
        for name in names:
            adapters = ADAPTERS if name == "policy" else ()
            servers.append(SglangServer(model, logs / f"sglang_{name}.log", adapters))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait_ready()
        yield tuple(servers)


def serve_forever(model: Path, log: Path, arguments: Sequence[str], port: int) -> None:
    """One server until this process is told to stop, or the server ends (StartupError)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with SglangServer(model, log, arguments, port) as server:
        print(f"SGLang serves {model} at {server.url} (log: {log}; Ctrl-C stops)", flush=True)
        server.process.wait()
        raise StartupError(f"SGLang ended; {tail(log)}")
