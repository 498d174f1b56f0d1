"""Codex without its screen, set up as docs/clients.md says: it runs the commands that the policy
calls, and a conversation goes on in a second process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.suites.commands import documented, run
from tests.clients.suites.conftest import NODE
from tests.clients.suites.endpoint import Endpoint, call, results, text_of

CODEX = NODE / "node_modules" / ".bin" / "codex"


@pytest.fixture
def folder(tmp_path: Path, endpoint: Endpoint) -> Path:
    """The folder that the agent works in, beside the settings of docs/clients.md."""
    settings = tmp_path / ".codex"
    settings.mkdir()
    title = "Coding agents that speak Responses"
    (settings / "config.toml").write_text(documented(title, "toml", endpoint.url), encoding="utf-8")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("the milk is sour\n", encoding="utf-8")
    return folder


async def ask(folder: Path, prompt: str, *resume: str) -> list[dict]:
    """One message of the user, answered in a process of its own; the events that Codex tells."""
    # Its sandbox needs a kernel's leave that a container may not have.
    options = ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
    command = (CODEX, "exec", *options, *resume, prompt)
    output = await run(*command, folder=folder, home=folder.parent, OPD_API_KEY="key")
    return [json.loads(line) for line in output.splitlines()]


def said(events: list[dict]) -> list[str]:
    """What the agent said."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


async def test_a_conversation_with_tools_is_one_session_and_trains(
    endpoint: Endpoint, folder: Path
) -> None:
    endpoint.will_say(
        "I look first.\n" + call("exec_command", cmd="echo it-is-$((40 + 2))"),
        call("exec_command", cmd="cat note.txt"),
        "The milk is sour.",
    )
    first = await ask(folder, "What does my note say?")
    assert said(first) == ["I look first.", "The milk is sour."]
    endpoint.will_say(call("exec_command", cmd="echo milk > list.txt"), "I wrote a list.")
    second = await ask(folder, "No, I meant: make me a list.", "resume", "--last")
    assert said(second) == ["I wrote a list."]
    assert (folder / "list.txt").read_text(encoding="utf-8") == "milk\n"
    turns = await endpoint.check_one_conversation(5)
    assert "it-is-42" in results(turns[0])[0]
    assert "the milk is sour" in results(turns[1])[0]
    assert "No, I meant: make me a list." in text_of(turns[2].next_state[-1])


async def test_calls_side_by_side_and_thinking(endpoint: Endpoint, folder: Path) -> None:
    endpoint.will_say(
        "<think>\nTwo at once.\n</think>\n\n"
        + call("exec_command", cmd="echo one")
        + "\n"
        + call("exec_command", cmd="echo two"),
        "Both are said.",
    )
    assert said(await ask(folder, "Say one and two.")) == ["Both are said."]
    turns = await endpoint.check_one_conversation(2)
    assert [("one" in result, "two" in result) for result in results(turns[0])] == [
        (True, False),
        (False, True),
    ]
