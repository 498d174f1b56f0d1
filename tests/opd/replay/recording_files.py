"""What the tests of the readers share: writing lines, and taking a recording apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS, assistant_call, result_text
from opd.replay.recordings.reading import read_recordings
from opd.replay.recordings.recorded import Problem, RecordedSession

DATA = Path(__file__).parents[2] / "data" / "replay"
AIRLINE = DATA / "tau_bench_airline_sessions.jsonl"
AIRLINE_VOTES = DATA / "tau_bench_airline_votes.jsonl"


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of `lines`: bytes as they are, everything else as JSON."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def read(path: Path) -> tuple[list[RecordedSession], list[Problem]]:
    """The sessions and the problems of a file or folder."""
    sessions: list[RecordedSession] = []
    problems: list[Problem] = []
    for found in read_recordings([path]):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            sessions.append(found)
    return sessions, problems


def one(path: Path) -> RecordedSession:
    """The session of a file that holds one, with nothing wrong but tools that are not logged."""
    sessions, problems = read(path)
    assert {problem.reason.value for problem in problems} <= {"missing_tools"}
    (session,) = sessions
    return session


def texts(messages: Iterable[dict[str, Any]]) -> list[str]:
    """What messages say, each with the first letter of its role."""
    return [f"{message['role'][0]}:{message['content']}" for message in messages]


def lab_recordings(folder: Path, names: Iterable[str], votes: Sequence[str]) -> tuple[Path, Path]:
    """A file of sessions of the tool lab, three answers in each, and one with `votes` on each."""
    sessions, judged = [], []
    for name in names:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"What is the weather in {name}?"},
        ]
        for number in range(3):
            judged.append(
                {"session_id": name, "message_index": len(messages), "votes": list(votes)}
            )
            messages += [
                {"role": "assistant", "content": f"It is 7{number} F in {name}."},
                {"role": "user", "content": "Please always use Celsius."},
            ]
        sessions.append({"session_id": name, "messages": messages, "tools": TOOLS})
    return (
        write_lines(folder / "sessions.jsonl", sessions),
        write_lines(folder / "votes.jsonl", judged),
    )


def answered_recordings(
    folder: Path, names: Iterable[str], call: Sequence[str], answer: Sequence[str]
) -> tuple[Path, Path]:
    """A file of sessions of the tool lab in which the agent calls a tool and tells its result, and
    one with the votes on `call` and on `answer`.
    """
    sessions, judged = [], []
    for number, name in enumerate(names):
        celsius = 20 + number
        fahrenheit = round(celsius * 9 / 5 + 32)
        result = {"temp_c": celsius, "temp_f": fahrenheit, "sky": "clear"}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"What is the weather in {name}?"},
            assistant_call("get_weather", {"city": name}, "c1"),
            {"role": "tool", "tool_call_id": "c1", "content": result_text(result)},
            {"role": "assistant", "content": f"It is {fahrenheit} F in {name}."},
            {"role": "user", "content": "Please use Celsius."},
        ]
        sessions.append({"session_id": name, "messages": messages, "tools": TOOLS})
        for place, votes in ((2, call), (4, answer)):
            line = {"session_id": name, "message_index": place, "votes": list(votes)}
            judged.append(line)
    return (
        write_lines(folder / "sessions.jsonl", sessions),
        write_lines(folder / "votes.jsonl", judged),
    )
