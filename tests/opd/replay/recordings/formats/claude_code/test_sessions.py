"""Lines in the shapes that the sources named in `sessions.py` show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.replay.recordings.recorded import RecordingFormat
from tests.opd.replay.recording_files import one, read, texts, write_lines

SESSION = "b3a7bd3c-5a10-4e7b-8ff0-7fc0cd6d1093"
SNAPSHOT = {
    "type": "file-history-snapshot",
    "messageId": "u1",
    "snapshot": {"messageId": "u1", "trackedFileBackups": {}},
    "isSnapshotUpdate": False,
}


def line(kind: str, uuid: str, parent: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "parentUuid": parent,
        "isSidechain": False,
        "userType": "external",
        "cwd": "/home/me/project",
        "sessionId": SESSION,
        "version": "2.1.33",
        "gitBranch": "main",
        "type": kind,
        "uuid": uuid,
        "timestamp": "2026-02-06T12:00:00.000Z",
        **fields,
    }


def user(uuid: str, parent: str | None, content: Any, **fields: Any) -> dict[str, Any]:
    return line("user", uuid, parent, message={"role": "user", "content": content}, **fields)


def answer(
    uuid: str, parent: str | None, message_id: str, *blocks: Any, **fields: Any
) -> dict[str, Any]:
    message = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": fields.pop("model", "claude-sonnet-4-5"),
        "content": [
            {"type": "text", "text": block} if isinstance(block, str) else block for block in blocks
        ],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 1},
    }
    return line("assistant", uuid, parent, message=message, requestId="req_1", **fields)


def use(call: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Read", "input": {"file_path": call}}


def result(uuid: str, parent: str, call: str, content: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": call, "content": content}
    return user(uuid, parent, [block], toolUseResult={"type": "text"})


# One response in three lines, its two calls answered on lines of their own, a hook's report amid.
TALK = [
    SNAPSHOT,
    user("u1", None, "Read both"),
    answer("a1", "u1", "msg_1", {"type": "thinking", "thinking": "Two.", "signature": "Eq0C"}),
    answer("a2", "a1", "msg_1", "I will.", use("c1")),
    answer("a3", "a2", "msg_1", use("c2")),
    line("progress", "p1", "a2", data={"type": "hook_progress", "hookEvent": "PreToolUse"}),
    result("r1", "p1", "c1", "one"),
    result("r2", "a3", "c2", [{"type": "text", "text": "two"}]),
    line("system", "s1", "r2", subtype="stop_hook_summary"),
    answer("a4", "s1", "msg_2", "One and two."),
    user("u2", "a4", [{"type": "text", "text": "Thanks"}]),
    answer("a5", "u2", "msg_3", "Welcome."),
]


def test_lines_of_one_response_and_its_results_stay_together(tmp_path: Path) -> None:
    session = one(write_lines(tmp_path / f"{SESSION}.jsonl", TALK))
    assert (session.session_id, session.format) == (SESSION, RecordingFormat.CLAUDE_CODE)
    first, second, third = session.turns
    assert first.response["content"] == "I will."
    assert first.response["reasoning_content"] == "Two."
    assert [call["id"] for call in first.response["tool_calls"]] == ["c1", "c2"]
    assert first.response["tool_calls"][0]["function"] == {
        "name": "Read",
        "arguments": '{"file_path":"c1"}',
    }
    assert texts(first.next_state) == ["t:one", "t:two"]
    assert texts(second.messages) == ["u:Read both", "a:I will.", "t:one", "t:two"]
    assert texts(second.next_state) == ["u:Thanks"]
    assert [turn.parent for turn in session.turns] == [None, first.position, second.position]
    assert third.next_state == []


def test_edited_prompt_is_another_path_of_the_session(tmp_path: Path) -> None:
    edited = [user("u3", "a4", "And a third"), answer("a6", "u3", "msg_4", "There is none.")]
    session = one(write_lines(tmp_path / "log.jsonl", [*TALK, *edited]))
    _, second, third, fourth = session.turns
    assert (third.parent, fourth.parent) == (second.position, second.position)
    assert texts(second.next_state) == ["u:Thanks"]
    assert texts(fourth.messages)[-2:] == ["a:One and two.", "u:And a third"]


def test_sidechains_are_sessions_of_their_own(tmp_path: Path) -> None:
    inside = [
        user("k1", None, "Search", isSidechain=True),
        answer("k2", "k1", "msg_5", "Found.", isSidechain=True),
    ]
    agent = [
        user("g1", None, "Count", isSidechain=True, agentId="ac47f8c"),
        answer("g2", "g1", "msg_6", "Three.", isSidechain=True, agentId="ac47f8c"),
    ]
    write_lines(tmp_path / "agent-ac47f8c.jsonl", agent)
    write_lines(tmp_path / "main.jsonl", [*TALK[:3], *inside, *TALK[3:]])
    sessions, _ = read(tmp_path)
    assert [(session.session_id, len(session.turns)) for session in sessions] == [
        (f"{SESSION}/agent-ac47f8c", 1),
        (SESSION, 3),
        (f"{SESSION}/sidechain-k1", 1),
    ]
    assert texts(sessions[2].turns[0].messages) == ["u:Search"]


def boundary(uuid: str, after: str, **metadata: Any) -> dict[str, Any]:
    return line(
        "system",
        uuid,
        None,
        subtype="compact_boundary",
        logicalParentUuid=after,
        content="Conversation compacted",
        compactMetadata={"trigger": "auto", "preTokens": 150000, **metadata},
    )


def summary(uuid: str, parent: str) -> dict[str, Any]:
    return user(uuid, parent, "So far: files.", isCompactSummary=True)


def test_prompt_behind_a_compaction_begins_with_the_summary(tmp_path: Path) -> None:
    after = [
        boundary("s2", "a5"),
        summary("u4", "s2"),
        user("u5", "u4", "Go on"),
        answer("a7", "u5", "msg_7", "Gone."),
    ]
    session = one(write_lines(tmp_path / "log.jsonl", [*TALK, *after]))
    *_, third, fourth = session.turns
    assert texts(fourth.messages) == ["u:So far: files.", "u:Go on"]
    assert fourth.parent == third.position
    assert texts(third.next_state) == ["u:Go on"]


KEPT = {
    "preservedSegment": {"headUuid": "a4", "anchorUuid": "u4", "tailUuid": "a5"},
    "preservedMessages": {"anchorUuid": "u4", "uuids": ["a4", "u2", "a5"]},
}
COMPACTED = [
    boundary("s2", "a5", **KEPT),
    summary("u4", "s2"),
    answer("a5", "u4", "msg_3", "Welcome."),
    user("u5", "a5", "Go on"),
    answer("a7", "u5", "msg_7", "Gone."),
]


def test_messages_that_a_compaction_keeps_stand_behind_the_summary(tmp_path: Path) -> None:
    """The last of them may be in the log only once, behind the summary, where it was not said."""
    again = one(write_lines(tmp_path / "again.jsonl", [*TALK, *COMPACTED]))
    late = one(write_lines(tmp_path / "late.jsonl", [*TALK[:-1], *COMPACTED]))
    for session in (again, late):
        *_, second, third, fourth = session.turns
        assert texts(third.messages)[-2:] == ["a:One and two.", "u:Thanks"]
        assert len(third.messages) == 6
        assert third.parent == second.position
        assert texts(third.next_state) == ["u:Go on"]
        assert texts(fourth.messages) == [
            "u:So far: files.",
            "a:One and two.",
            "u:Thanks",
            "a:Welcome.",
            "u:Go on",
        ]
        assert fourth.parent == third.position


def test_summary_of_what_is_not_in_the_file_begins_the_session(tmp_path: Path) -> None:
    kept = {"preservedSegment": {"headUuid": "k1", "anchorUuid": "u4", "tailUuid": "k1"}}
    for start, name in (
        (boundary("s2", "elsewhere"), "plain"),
        (boundary("s2", "k1", **kept), "k"),
    ):
        lines = [start, summary("u4", "s2"), answer("k1", "u4", "msg_1", "Kept.")]
        lines += [user("u5", "k1", "Go on"), answer("a7", "u5", "msg_7", "Gone.")]
        session = one(write_lines(tmp_path / f"{name}.jsonl", lines))
        assert [turn.problem for turn in session.turns] == [None, None]
        assert texts(session.turns[0].messages) == ["u:So far: files."]
        assert texts(session.turns[1].messages) == ["u:So far: files.", "a:Kept.", "u:Go on"]


def test_lines_that_the_model_did_not_say_or_read_are_passed_over(tmp_path: Path) -> None:
    lines = [
        {"type": "summary", "summary": "Reading files", "leafUuid": "elsewhere"},
        user("m1", None, "Caveat: local commands follow", isMeta=True),
        user("u1", "m1", "Hello"),
        answer("e1", "u1", "x1", "API Error: 529", model="<synthetic>", isApiErrorMessage=True),
        {"type": "queue-operation", "operation": "enqueue", "sessionId": SESSION},
        line("attachment", "t1", "e1", attachment={"type": "todo"}),
        answer("a1", "t1", "msg_1", "Hello."),
        line("a-type-of-tomorrow", "z1", "a1"),
        user("u2", "z1", "Bye"),
    ]
    session = one(write_lines(tmp_path / "log.jsonl", lines))
    (turn,) = session.turns
    assert texts(turn.messages) == ["u:Hello"]
    assert texts(turn.next_state) == ["u:Bye"]


def test_line_that_is_written_again_counts_once(tmp_path: Path) -> None:
    session = one(write_lines(tmp_path / "log.jsonl", [*TALK, *TALK[1:]]))
    assert len(session.turns) == 3


def test_user_may_speak_in_the_line_of_a_result(tmp_path: Path) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "refused", "is_error": True},
        {"type": "text", "text": "[Request interrupted by user]"},
    ]
    lines = [user("u1", None, "Go"), answer("a1", "u1", "msg_1", use("c1"))]
    session = one(write_lines(tmp_path / "log.jsonl", [*lines, user("u2", "a1", blocks)]))
    assert texts(session.turns[0].next_state) == ["t:refused", "u:[Request interrupted by user]"]


def test_image_spoils_the_turns_behind_it(tmp_path: Path) -> None:
    picture = [{"type": "image", "source": {"type": "base64", "data": "iVBO"}}]
    lines: list[Any] = [*TALK]
    lines[10] = user("u2", "a4", picture)
    (session,), problems = read(write_lines(tmp_path / "log.jsonl", lines))
    assert [(p.line, p.reason.value) for p in problems] == [(11, "image"), (2, "missing_tools")]
    assert [turn.problem for turn in session.turns] == [None, None, problems[0]]


def test_bad_lines_spoil_what_names_them(tmp_path: Path) -> None:
    lines: list[Any] = [*TALK]
    lines[9] = b'{"type": "assistant", "uuid": "a4"'
    lines.append(line("user", "u9", "a5", message="error"))
    lines += [{"silly": "this"}, {"type": "user", "message": {"role": "user"}}, [1]]
    (session,), problems = read(write_lines(tmp_path / "log.jsonl", lines))
    assert [(p.line, p.reason.value) for p in problems] == [
        (10, "not_json"),
        (14, "bad_shape"),
        (15, "bad_shape"),
        (16, "bad_shape"),
        (11, "bad_shape"),
        (13, "bad_shape"),
        (2, "missing_tools"),
    ]
    assert "'a4', is not in the file" in problems[4].detail
    assert [turn.problem for turn in session.turns] == [None, problems[4]]


def test_results_that_name_no_call_are_named(tmp_path: Path) -> None:
    lines: list[Any] = [*TALK]
    for at in (6, 7):
        block = {"type": "tool_result", "tool_use_id": {"id": at}, "content": "one"}
        lines[at] = user(lines[at]["uuid"], lines[at]["parentUuid"], [block])
    (session,), problems = read(write_lines(tmp_path / "log.jsonl", lines))
    assert [p.reason.value for p in problems[:2]] == ["tool_result_without_call"] * 2
    assert [turn.problem for turn in session.turns] == [None, problems[0], problems[0]]


def test_file_of_summaries_holds_no_session(tmp_path: Path) -> None:
    lines = [{"type": "summary", "summary": "x", "leafUuid": "y"}]
    sessions, (problem,) = read(write_lines(tmp_path / "log.jsonl", lines))
    assert sessions == []
    assert (problem.reason.value, problem.session_id) == ("no_messages", "log")
