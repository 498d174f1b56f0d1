"""OpenAI chat conversations: one JSON object per line, one line per session.

`messages` is OpenAI's list of chat messages (https://platform.openai.com/docs/api-reference/chat).
Optional: `tools` (OpenAI's definitions), `session_id` (else the file's name and the line's number),
`outcome_reward` (a number), `data_source` (a text: where the task comes from, which may choose the
teacher). Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opd.replay.recordings.checks import checked_tools
from opd.replay.recordings.conversation import session_of
from opd.replay.recordings.entries import Origin, path_entries
from opd.replay.recordings.formats.lines import MAX_LINE_BYTES, Line, read_lines
from opd.replay.recordings.recorded import (
    ImportProblem,
    Problem,
    RecordedSession,
    Recording,
    RecordingFormat,
)


def is_openai_chat(value: dict[str, Any]) -> bool:
    """Whether a line is of this format."""
    return isinstance(value.get("messages"), list)


def read_openai_chat(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Recording:
    """The sessions of `path`, one line at a time."""
    for line in read_lines(path, max_line_bytes):
        if isinstance(line, Problem):
            yield line
        else:
            yield from _session(path, line)


def _session(path: Path, line: Line) -> Iterator[RecordedSession | Problem]:
    value = line.value
    origin = Origin(
        session_id=session_id_of(value, path, line.number),
        format=RecordingFormat.OPENAI_CHAT,
        source=str(path),
        line=line.number,
    )
    messages = value.get("messages")
    if not isinstance(messages, list):
        yield origin.problem(ImportProblem.BAD_SHAPE, "the line has no list 'messages'")
        return
    tools, fault = checked_tools(value.get("tools"))
    if fault is not None:
        yield origin.problem(*fault)
    reward = value.get("outcome_reward")
    if reward is not None and not is_number(reward):
        yield origin.problem(ImportProblem.BAD_SHAPE, f"outcome_reward {reward!r} is not a number")
        reward = None
    source = value.get("data_source")
    if source is not None and not isinstance(source, str):
        yield origin.problem(ImportProblem.BAD_SHAPE, f"data_source {source!r} is not a text")
        source = None
    yield from session_of(
        path_entries(messages), origin, tools=tools, outcome_reward=reward, data_source=source
    )


def session_id_of(value: dict[str, Any], path: Path, number: int) -> str:
    """The line's `session_id`; without one, a name that is the same when the file is read again."""
    given = value.get("session_id")
    if isinstance(given, str) and given:
        return given
    return str(given) if is_number(given) else f"{path.stem}-{number}"


def is_number(value: Any) -> bool:
    """Whether `value` is a JSON number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
