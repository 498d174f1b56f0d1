"""Claude Code without its screen, set up as docs/clients.md says: it runs the tools that the policy
calls, and a conversation goes on in a second process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.suites.commands import documented, run
from tests.clients.suites.conftest import NODE
from tests.clients.suites.endpoint import Endpoint, call, results, text_of

CLAUDE = NODE / "node_modules" / ".bin" / "claude"
SILENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the agent works in."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("the milk is sour\n", encoding="utf-8")
    return folder


async def ask(endpoint: Endpoint, folder: Path, prompt: str, *options: str) -> dict:
    """One message of the user, answered in a process of its own."""
    script = f"""{documented("Coding agents that speak Messages", "bash", endpoint.url)}
exec "$@" """
    tools = ("--allowedTools", "Bash", "Read", "Write")
    output = await run(
        *("bash", "-ec", script, "claude"),
        *(CLAUDE, "-p", prompt, "--output-format", "json", *options, *tools),
        folder=folder,
        home=folder.parent,
        **SILENT,
    )
    return json.loads(output)


async def test_a_conversation_with_tools_is_one_session_and_trains(
    endpoint: Endpoint, folder: Path
) -> None:
    note = str(folder / "note.txt")
    endpoint.will_say(
        "I look first.\n" + call("Bash", command="echo it-is-$((40 + 2))", description="Say it"),
        call("Read", file_path=note),
        "The milk is sour.",
    )
    first = await ask(endpoint, folder, "What does my note say?")
    assert first["result"] == "The milk is sour."
    endpoint.will_say(
        call("Write", file_path=str(folder / "list.txt"), content="milk\n"),
        "I wrote a list.",
    )
    second = await ask(endpoint, folder, "No, I meant: make me a list.", "--continue")
    assert second["result"] == "I wrote a list."
    assert second["session_id"] == first["session_id"]
    assert (folder / "list.txt").read_text(encoding="utf-8") == "milk\n"
    turns = await endpoint.check_one_conversation(5)
    assert results(turns[0]) == ["it-is-42"]
    assert "the milk is sour" in results(turns[1])[0]
    assert "No, I meant: make me a list." in text_of(turns[2].next_state[-1])


async def test_calls_side_by_side_and_thinking(endpoint: Endpoint, folder: Path) -> None:
    endpoint.will_say(
        "<think>\nTwo at once.\n</think>\n\n"
        + call("Bash", command="echo one", description="One")
        + "\n"
        + call("Bash", command="echo two", description="Two"),
        "Both are said.",
    )
    answer = await ask(endpoint, folder, "Say one and two.")
    assert answer["result"] == "Both are said."
    turns = await endpoint.check_one_conversation(2)
    # Run beside each other, and told in the order in which they ended.
    assert sorted(results(turns[0])) == ["one", "two"]
