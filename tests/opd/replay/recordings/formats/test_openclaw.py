"""Session files in the shapes of pi's `docs/session.md` and of the files of its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.replay.recordings.recorded import RecordingFormat
from tests.opd.replay.recording_files import one, read, texts, write_lines

HEADER = {
    "type": "session",
    "version": 3,
    "id": "0a1b2c3d-1111-4222-8333-444455556666",
    "timestamp": "2026-02-03T14:00:00.000Z",
    "cwd": "/home/me/project",
}
USAGE = {"input": 10, "output": 5, "cacheRead": 0, "cacheWrite": 0, "totalTokens": 15}


def entry(identity: str, parent: str | None, kind: str = "message", **fields: Any) -> Any:
    common = {"id": identity, "parentId": parent, "timestamp": "2026-02-03T14:00:01.000Z"}
    return {"type": kind, **common, **fields}


def user(identity: str, parent: str | None, text: str) -> Any:
    content = [{"type": "text", "text": text}]
    return entry(identity, parent, message={"role": "user", "content": content, "timestamp": 1})


def answer(identity: str, parent: str | None, *blocks: Any, **fields: Any) -> Any:
    message = {
        "role": "assistant",
        "content": [
            {"type": "text", "text": block} if isinstance(block, str) else block for block in blocks
        ],
        "api": "anthropic-messages",
        "provider": "anthropic",
        "model": "claude-sonnet-4-5",
        "usage": USAGE,
        "stopReason": "stop",
        "timestamp": 2,
        **fields,
    }
    return entry(identity, parent, message=message)


def result(identity: str, parent: str, call: str, text: str) -> Any:
    return entry(
        identity,
        parent,
        message={
            "role": "toolResult",
            "toolCallId": call,
            "toolName": "read",
            "content": [{"type": "text", "text": text}],
            "isError": False,
            "timestamp": 3,
        },
    )


def tool_call(call: str) -> dict[str, Any]:
    return {"type": "toolCall", "id": call, "name": "read", "arguments": {"path": "a.txt"}}


TALK = [
    entry("m0", None, "model_change", provider="anthropic", modelId="claude-sonnet-4-5"),
    user("u1", "m0", "Read both files"),
    answer(
        "a1",
        "u1",
        {"type": "thinking", "thinking": "Two calls."},
        "I will.",
        tool_call("c1"),
        tool_call("c2"),
        stopReason="toolUse",
    ),
    result("r1", "a1", "c1", "one"),
    entry("h1", "r1", "thinking_level_change", thinkingLevel="high"),
    result("r2", "h1", "c2", "two"),
    answer("a2", "r2", "One and two."),
    user("u2", "a2", "Thanks"),
    answer("a3", "u2", "Welcome."),
]


def test_entries_become_turns(tmp_path: Path) -> None:
    session = one(write_lines(tmp_path / "log.jsonl", [HEADER, *TALK]))
    assert (session.session_id, session.format) == (HEADER["id"], RecordingFormat.OPENCLAW)
    first, second, third = session.turns
    assert first.response == {
        "role": "assistant",
        "content": "I will.",
        "reasoning_content": "Two calls.",
        "tool_calls": [
            {
                "id": call,
                "type": "function",
                "function": {"name": "read", "arguments": '{"path":"a.txt"}'},
            }
            for call in ("c1", "c2")
        ],
    }
    assert texts(first.next_state) == ["t:one", "t:two"]
    assert first.next_state[0]["tool_call_id"] == "c1"
    assert texts(second.next_state) == ["u:Thanks"]
    assert [turn.parent for turn in session.turns] == [None, first.position, second.position]
    assert texts(third.messages)[-2:] == ["a:One and two.", "u:Thanks"]


def test_branches_are_paths_of_one_session(tmp_path: Path) -> None:
    branch = [
        entry("b0", "a2", "branch_summary", fromId="a3", summary="The user said thanks."),
        user("u3", "b0", "What else?"),
        answer("a4", "u3", "Nothing."),
        entry("l1", "a4", "label", targetId="u1", label="start"),
    ]
    session = one(write_lines(tmp_path / "log.jsonl", [HEADER, *TALK, *branch]))
    first, second, third, fourth = session.turns
    assert (third.parent, fourth.parent) == (second.position, second.position)
    assert texts(fourth.messages)[-3:] == [
        "a:One and two.",
        "u:The user said thanks.",
        "u:What else?",
    ]
    assert texts(second.next_state) == ["u:Thanks"]
    assert first.parent is None


def test_prompt_behind_a_compaction_is_summary_and_what_is_kept(tmp_path: Path) -> None:
    after = [
        entry("k1", "a3", "compaction", summary="Files.", firstKeptEntryId="u2", tokensBefore=9),
        user("u3", "k1", "Go on"),
        answer("a4", "u3", "Gone."),
    ]
    session = one(write_lines(tmp_path / "log.jsonl", [HEADER, *TALK, *after]))
    last = session.turns[-1]
    assert texts(last.messages) == ["u:Files.", "u:Thanks", "a:Welcome.", "u:Go on"]
    assert last.parent == session.turns[-2].position
    assert texts(session.turns[-2].next_state) == ["u:Go on"]


def test_first_version_is_a_line_of_entries(tmp_path: Path) -> None:
    header = {key: value for key, value in HEADER.items() if key != "version"}
    lines = [
        {key: value for key, value in line.items() if key not in ("id", "parentId")}
        for line in TALK
    ]
    compaction = {"type": "compaction", "summary": "Files.", "firstKeptEntryIndex": 8}
    after = [compaction, *lines[-2:]]
    session = one(write_lines(tmp_path / "log.jsonl", [header, *lines, *after]))
    assert len(session.turns) == 4
    assert texts(session.turns[-1].messages) == ["u:Files.", "u:Thanks", "a:Welcome.", "u:Thanks"]


def test_line_that_is_lost_in_the_first_version_spoils_what_follows(tmp_path: Path) -> None:
    header = {key: value for key, value in HEADER.items() if key != "version"}
    lines: list[Any] = [
        {key: value for key, value in line.items() if key not in ("id", "parentId")}
        for line in TALK
    ]
    lines.insert(-2, b"{broken")
    (session,), problems = read(write_lines(tmp_path / "log.jsonl", [header, *lines]))
    assert [(p.line, p.reason.value) for p in problems] == [
        (9, "not_json"),
        (None, "missing_tools"),
    ]
    assert [turn.problem for turn in session.turns] == [None, None, problems[0]]


def test_line_that_is_lost_in_a_tree_spoils_what_names_it(tmp_path: Path) -> None:
    lines: list[Any] = [HEADER, *TALK]
    lines[8] = b"{broken"
    (session,), problems = read(write_lines(tmp_path / "log.jsonl", lines))
    assert [(p.line, p.reason.value) for p in problems] == [
        (9, "not_json"),
        (10, "bad_shape"),
        (None, "missing_tools"),
    ]
    assert "'u2', is not in the file" in problems[1].detail
    assert [turn.problem for turn in session.turns] == [None, None, problems[1]]
    assert session.turns[-1].parent is None


def test_answers_that_are_not_sent_again_are_no_turns(tmp_path: Path) -> None:
    lines = [
        user("u1", None, "Hello"),
        answer("a1", "u1", "Hel", stopReason="aborted", errorMessage="Request was aborted"),
        answer("a2", "a1", stopReason="error", errorMessage="overloaded"),
        user("u2", "a2", "Again"),
        answer("a3", "u2", "Hello."),
        answer("a4", "a3", "Hello.", provider="openclaw", model="delivery-mirror"),
        user("u3", "a4", "Yes?"),
        answer("a5", "u3", "Yes."),
    ]
    first, second = one(write_lines(tmp_path / "log.jsonl", [HEADER, *lines])).turns
    assert texts(first.messages) == ["u:Hello", "u:Again"]
    assert texts(second.messages) == ["u:Hello", "u:Again", "a:Hello.", "a:Hello.", "u:Yes?"]


def test_messages_of_the_client_become_the_users(tmp_path: Path) -> None:
    def bash(identity: str, parent: str, **more: Any) -> Any:
        message = {"role": "bashExecution", "command": "ls", "output": "a.txt", **more}
        return entry(identity, parent, message=message)

    lines = [
        user("u1", None, "Look"),
        bash("b1", "u1"),
        bash("b2", "b1", excludeFromContext=True),
        entry("x1", "b2", "custom", customType="state", data={"count": 1}),
        entry("x2", "x1", "custom_message", customType="note", content="Be brief.", display=False),
        answer("a1", "x2", "a.txt"),
        entry("x3", "a1", message={"role": "robot", "content": "beep"}),
        answer("a2", "x3", "What?"),
    ]
    (session,), (problem,) = read(write_lines(tmp_path / "log.jsonl", [HEADER, *lines]))
    first, second = session.turns
    assert texts(first.messages) == ["u:Look", "u:$ ls\na.txt", "u:Be brief."]
    assert (problem.reason.value, problem.line) == ("unknown_role", 8)
    assert (first.problem, second.problem) == (None, problem)


def test_entries_that_lead_in_a_circle_are_left_out(tmp_path: Path) -> None:
    circle = [user("u8", "a8", "Round"), answer("a8", "u8", "and round")]
    path = write_lines(tmp_path / "log.jsonl", [HEADER, *TALK, *circle])
    (session,), problems = read(path)
    assert len(session.turns) == 3
    assert [p.line for p in problems if p.reason.value == "bad_shape"] == [11, 12]


def test_file_without_messages_says_so(tmp_path: Path) -> None:
    sessions, (problem,) = read(write_lines(tmp_path / "log.jsonl", [HEADER]))
    assert sessions == []
    assert (problem.reason.value, problem.session_id) == ("no_messages", HEADER["id"])
