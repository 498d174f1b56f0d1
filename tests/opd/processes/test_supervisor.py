"""The supervisor starts, restarts and stops its own children, on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opd.processes.supervisor import ChildFailed, Patience, Supervisor, free_ports
from tests.opd.processes.pids import pids_of

ROOT = Path(__file__).parents[3]
# Says that it is up by writing its process id, then waits for its end.
CHILD = (
    "import os, pathlib, signal, sys, time\n"
    "from opd.processes.supervisor import watch_parent\n"
    "watch_parent()\n"
    "path = pathlib.Path(sys.argv[1]); path.with_suffix('.new').write_text(str(os.getpid()))\n"
    "path.with_suffix('.new').rename(path)\n"
    "signal.pause()\n"
)


def child_arguments(path: Path) -> list[str]:
    return ["-c", CHILD, str(path)]


async def wait_for(condition, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def ready_when(path: Path):
    async def ready() -> bool:
        return path.exists()

    return ready


async def test_child_that_is_killed_comes_back_and_stop_ends_it(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs")
    path = tmp_path / "pid"
    await supervisor.start("child", child_arguments(path), ready_when(path), 20)
    first = pids_of(supervisor)["child"]
    path.unlink()
    os.kill(first, signal.SIGKILL)
    await wait_for(path.exists)
    second = pids_of(supervisor)["child"]
    assert second != first
    await supervisor.stop()
    assert pids_of(supervisor) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_child_that_ends_while_starting_is_reported_with_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs")
    with pytest.raises(ChildFailed, match=r"(?s)ended while starting.*no such thing"):
        await supervisor.start(
            "child", ["-c", "raise SystemExit('no such thing')"], ready_when(tmp_path / "x"), 20
        )
    await supervisor.stop()


async def test_child_that_keeps_ending_fails_the_run(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs", max_restarts_a_minute=2)

    async def at_once() -> bool:
        return True

    await supervisor.start("child", ["-c", "raise SystemExit(3)"], at_once, 20)
    with pytest.raises(ChildFailed, match="ended 3 times in a minute"):
        await asyncio.wait_for(supervisor.failed, 20)
    await supervisor.stop()


# Ends itself by a signal, as the kernel would, and counts how often it has begun.
DYING = (
    "import os, pathlib, signal, sys\n"
    "begun = pathlib.Path(sys.argv[1]); begun.open('a').write('.')\n"
    "if len(sys.argv) > 4: pathlib.Path(sys.argv[3]).write_text(begun.read_text())\n"
    "os.kill(os.getpid(), int(sys.argv[2]))\n"
)


async def at_once() -> bool:
    return True


# Tells that it has its file, and takes a while to end.
SLOW = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), os._exit(0)))\n"
    "os.write(int(sys.argv[1]), b'.')\n"
    "while True: signal.pause()\n"
)


async def test_children_of_a_group_inherit_files_at_each_start_and_end_together(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(tmp_path / "logs")
    reading, writing = os.pipe()
    for name in ("worker", "worker.2", "worker.3"):
        await supervisor.start(name, ["-c", SLOW, str(writing)], at_once, 20, files=(writing,))
    for _ in range(3):
        assert await asyncio.to_thread(os.read, reading, 1) == b"."
    os.kill(pids_of(supervisor)["worker.2"], signal.SIGKILL)
    assert await asyncio.to_thread(os.read, reading, 1) == b"."
    began = asyncio.get_running_loop().time()
    await supervisor.stop("worker")
    assert asyncio.get_running_loop().time() - began < 3.5, "each takes 1.5 s"
    assert pids_of(supervisor) == {}
    assert os.read(reading, 1) == b"", "nobody has it open any more"
    os.close(reading)
    await supervisor.stop()


async def test_a_child_that_is_killed_without_progress_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(tmp_path / "logs", max_restarts_a_minute=100)
    begun = tmp_path / "begun"
    patience = Patience(progress=lambda: 7, remedy="set trainer.memory_gb")
    arguments = ["-c", DYING, str(begun), str(int(signal.SIGKILL))]
    await supervisor.start("trainer", arguments, at_once, 20, patience=patience)
    with pytest.raises(ChildFailed, match=r"3 times without a training step .*memory_gb"):
        await asyncio.wait_for(supervisor.failed, 20)
    assert len(begun.read_text()) == 3
    assert (
        caplog.messages.count(
            "trainer ended by signal SIGKILL, probably out of memory: the system ended it; it is "
            "restarted"
        )
        == 2
    )
    await supervisor.stop()


async def test_kills_with_progress_in_between_do_not_count(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs", max_restarts_a_minute=5)
    begun, version = tmp_path / "begun", tmp_path / "version"
    patience = Patience(progress=lambda: version.read_text(), remedy="set trainer.memory_gb")
    arguments = ["-c", DYING, str(begun), str(int(signal.SIGKILL)), str(version)]
    await supervisor.start("trainer", arguments, at_once, 20, patience=patience)
    with pytest.raises(ChildFailed, match="ended 6 times in a minute by signal SIGKILL"):
        await asyncio.wait_for(supervisor.failed, 20)
    await supervisor.stop()


async def test_another_signal_is_no_sign_of_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(tmp_path / "logs", max_restarts_a_minute=3)
    patience = Patience(progress=lambda: 7, remedy="set trainer.memory_gb")
    arguments = ["-c", DYING, str(tmp_path / "begun"), str(int(signal.SIGSEGV))]
    await supervisor.start("trainer", arguments, at_once, 20, patience=patience)
    with pytest.raises(ChildFailed, match="ended 4 times in a minute by signal SIGSEGV"):
        await asyncio.wait_for(supervisor.failed, 20)
    assert caplog.messages == ["trainer ended by signal SIGSEGV; it is restarted"] * 3
    await supervisor.stop()


async def test_a_child_gets_its_environment(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs")
    path = tmp_path / "said"
    code = (
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ['GIVEN'] + str('PATH' in os.environ))\n"
        "time.sleep(60)\n"
    )
    await supervisor.start(
        "child", ["-c", code, str(path)], ready_when(path), 20, environment={"GIVEN": "yes"}
    )
    await wait_for(lambda: path.read_text() == "yesTrue")
    await supervisor.stop()


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = (
        "import asyncio, pathlib, sys\n"
        "from opd.processes.supervisor import Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor(pathlib.Path(sys.argv[1]).parent / 'logs')\n"
        "    path = pathlib.Path(sys.argv[1])\n"
        "    async def ready(): return path.exists()\n"
        "    await supervisor.start('child', ['-c', sys.argv[2], str(path)], ready, 20)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(path), CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    child = int(path.read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(wait_for(lambda: not _alive(child)))


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(5))) == 5


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie that nobody reaps has ended too.
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
