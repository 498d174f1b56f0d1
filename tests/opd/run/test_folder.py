"""A run folder is one command's and one trainer's, until their process is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from opd.run.folder import RunFolderTaken, only_command, only_trainer

HOLDER = """
import sys
from pathlib import Path
from opd.run.folder import only_command
with only_command(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_command_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderTaken, match="a run is at work here"), only_command(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with only_command(tmp_path):
            pass


async def test_a_trainer_waits_for_the_one_before_it(tmp_path: Path) -> None:
    order: list[str] = []
    first_holds, first_may_end = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with only_trainer(tmp_path):
            first_holds.set()
            await first_may_end.wait()
            order.append("first ends")

    async def second() -> None:
        await first_holds.wait()
        with pytest.raises(RunFolderTaken, match="did not end within 0 s"):
            async with only_trainer(tmp_path, wait_s=0.0):
                pass
        first_may_end.set()
        async with only_trainer(tmp_path):
            order.append("second begins")

    await asyncio.gather(first(), second())
    assert order == ["first ends", "second begins"]
