"""Runs a client as a person would: in a folder and a home of its own, set up as docs/clients.md
says, with nothing of this machine's settings.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from tests.clients.doors.conftest import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "TERM")


def documented(title: str, language: str, url: str) -> str:
    """The first block of `language` under the heading that begins with `title`, at `url`."""
    _, _, section = PAGE.partition(f"\n## {title}")
    found = re.search(rf"```{language}\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    assert found is not None, f"docs/clients.md lacks a block of {language} under {title!r}"
    assert ADDRESS in found[1]
    return found[1].replace(ADDRESS, url)


async def run(
    *command: str | Path, folder: Path, home: Path, timeout_s: float = 120, **settings: str
) -> str:
    """Standard output. Fails with what the command printed if it does not end well in time."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env={**kept, "HOME": str(home), **settings},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        output, errors = await process.communicate()
        raise AssertionError(
            f"not done in {timeout_s} s: {output.decode()} {errors.decode()}"
        ) from None
    assert process.returncode == 0, f"{output.decode()}\n{errors.decode()}"
    return output.decode()
