"""The openai JavaScript SDK, through Node: whole and streamed chat completions."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS
from tests.clients.doors.conftest import Lab
from tests.clients.doors.conversation import MAX_STEPS, USERS, check_recorded, run_tool

SOURCES = Path(__file__).parent / "javascript"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script beside the SDK of the pinned version."""
    if shutil.which("npm") is None:
        pytest.skip("no Node with npm on this machine")
    folder = tmp_path_factory.mktemp("javascript")
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert installed.returncode == 0, installed.stderr
    return folder


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_tool_conversation(lab: Lab, folder: Path, stream: bool) -> None:
    given = {
        "base_url": f"{lab.url}/v1",
        "system": SYSTEM_PROMPT,
        "tools": TOOLS,
        "users": USERS,
        "max_steps": MAX_STEPS,
        "result": run_tool("get_weather", {"city": ""}),
        "stream": stream,
    }
    process = await asyncio.create_subprocess_exec(
        "node",
        "conversation.mjs",
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, errors.decode()
    last = json.loads(output)
    turns = await check_recorded(lab)
    assert last["id"] == f"chatcmpl-{turns[-1].turn_id}"
    assert last["content"] == turns[-1].response["content"]
