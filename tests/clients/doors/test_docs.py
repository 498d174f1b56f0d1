"""What docs/clients.md tells its readers to run, run."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.clients.doors.conftest import ROOT, Lab
from tests.clients.doors.conversation import recorded

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## (.*)\n(?:(?!^## ).*\n)*?```python\n((?s:.*?))```", PAGE, re.MULTILINE)


def test_every_python_block_of_the_page_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```python") >= 7


@pytest.mark.parametrize("code", [pytest.param(code, id=title) for title, code in BLOCKS])
async def test_block(lab: Lab, code: str, tmp_path: Path) -> None:
    assert "http://127.0.0.1:8000" in code
    script = tmp_path / "block.py"
    script.write_text(code.replace("http://127.0.0.1:8000", lab.url), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert await recorded(lab)
