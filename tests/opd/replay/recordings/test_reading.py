from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from opd.replay.recordings.reading import check_recordings, detect_format, read_recordings
from opd.replay.recordings.recorded import Problem, RecordingFormat
from tests.opd.replay.recording_files import AIRLINE, AIRLINE_VOTES, DATA, read, write_lines

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
OTHER_TALK = {
    "messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": 'd"\\'}]
}
RECORD = {"session_id": "s", "turn": 1, "messages": [], "response_text": "b", "next_state": None}
CLAUDE = {"type": "user", "uuid": "u", "parentUuid": None, "sessionId": "s", "message": {}}
OPENCLAW = {"type": "session", "id": "s", "timestamp": "2026-01-01T00:00:00Z", "cwd": "/"}
EXPORT = {"format": "hindsight-opd-export", "version": 7}


@pytest.mark.parametrize(
    ("line", "format"),
    [
        (TALK, RecordingFormat.OPENAI_CHAT),
        (RECORD, RecordingFormat.OPENCLAW_RL),
        (CLAUDE, RecordingFormat.CLAUDE_CODE),
        ({"type": "summary", "summary": "x", "leafUuid": "u"}, RecordingFormat.CLAUDE_CODE),
        (OPENCLAW, RecordingFormat.OPENCLAW),
        (EXPORT, RecordingFormat.EXPORT),
    ],
)
def test_format_is_that_of_the_first_line_that_has_one(
    tmp_path: Path, line: Any, format: RecordingFormat
) -> None:
    path = write_lines(tmp_path / "any.jsonl", [b"{broken", b"", {"a": 1}, line, TALK])
    assert detect_format(path) is format


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "no line that is a JSON object"),
        ([b"[1]", b"{"], "no line that is a JSON object"),
        ([{"a": 1}], "openai-chat"),
    ],
)
def test_unknown_file_is_one_problem(tmp_path: Path, lines: list[Any], says: str) -> None:
    path = write_lines(tmp_path / "any.jsonl", lines)
    sessions, (problem,) = read(path)
    assert sessions == []
    assert problem.reason.value == "unknown_format"
    assert says in problem.detail
    assert detect_format(path) == problem


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b" \n\n", "it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (b"[]", "no line that is a JSON object"),
        (json.dumps(TALK).encode("utf-16"), "UTF-16"),
        (json.dumps(TALK, indent=1).encode(), "takes several lines"),
        (json.dumps({"conversation": [], "user": 1}).encode(), "'conversation', 'user'"),
    ],
)
def test_unknown_file_is_told_what_it_is(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    problem = detect_format(path)
    assert isinstance(problem, Problem)
    assert says in problem.detail


PACKED = {
    "gzip": lambda data: gzip.compress(data),
    "zstd": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
    "not packed": lambda data: data,
}
SHAPED = {
    "lines": json.dumps(TALK).encode() + b"\n" + json.dumps(OTHER_TALK).encode(),
    "array": json.dumps([TALK, OTHER_TALK]).encode(),
    "indented array": json.dumps([TALK, OTHER_TALK], indent=1).encode(),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("shape", SHAPED)
def test_packed_files_and_arrays_are_read_as_their_lines_are(
    tmp_path: Path, packed: str, shape: str
) -> None:
    path = tmp_path / "any.data"
    path.write_bytes(PACKED[packed](SHAPED[shape]))
    sessions, problems = read(path)
    assert problems == []
    assert [session.turns[0].response for session in sessions] == [
        {"role": "assistant", "content": talk["messages"][1]["content"]}
        for talk in (TALK, OTHER_TALK)
    ]


def test_a_packed_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = b"".join(json.dumps(TALK).encode() + b"\n" for _ in range(2000))
    for packed in ("gzip", "zstd"):
        data = PACKED[packed](lines + random.Random(0).randbytes(200_000).hex().encode())
        path = tmp_path / packed
        path.write_bytes(data[: len(data) // 2])
        sessions, problems = read(path)
        assert sessions
        assert problems[-1].reason.value == "unreadable"


def test_a_packed_recording_is_read_where_lines_are_read_again(tmp_path: Path) -> None:
    lines = [{**RECORD, "turn": turn, "response_text": str(turn)} for turn in (1, 2)]
    plain = write_lines(tmp_path / "plain.jsonl", lines)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    (expected,), (found,) = read(plain)[0], read(packed)[0]
    assert [turn.response for turn in found.turns] == [turn.response for turn in expected.turns]
    assert len(found.turns) == 2


def test_a_folder_is_also_its_packed_files_and_its_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(TALK).encode()))
    (tmp_path / "b.json").write_text(json.dumps([OTHER_TALK]))
    (tmp_path / "c.json").write_text(json.dumps({"settings": 1}))
    write_lines(tmp_path / "d.jsonl", [{"what": 1}])
    sessions, (problem,) = read(tmp_path)
    assert [Path(session.source).name for session in sessions] == ["a.jsonl.gz", "b.json"]
    assert problem.source.endswith("d.jsonl")
    check_recordings([tmp_path])


def test_where_nothing_can_be_read_the_first_reason_is_given(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, [{"what": 1}])
    with pytest.raises(ValueError, match=r"a\.jsonl: its lines are in none.*and 1 more files"):
        check_recordings([tmp_path])


def test_votes_are_told_from_sessions() -> None:
    found = detect_format(AIRLINE_VOTES)
    assert isinstance(found, Problem)
    assert "votes" in found.detail


def test_folder_is_its_files_sorted_and_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_lines(tmp_path / "b" / "x.jsonl", [TALK])
    write_lines(tmp_path / "a.jsonl", [TALK])
    write_lines(tmp_path / "notes.txt", [TALK])
    shutil.copy(AIRLINE, tmp_path / "c.jsonl")
    found = list(read_recordings([tmp_path / "b", tmp_path, tmp_path / "a.jsonl"]))
    names = [Path(session.source).name for session in found if not isinstance(session, Problem)]
    assert names == ["x.jsonl", "a.jsonl", *["c.jsonl"] * 4]
    assert len(found) == len(names)


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = list(read_recordings([tmp_path / "gone.jsonl", empty, AIRLINE]))
    problems = [element for element in found if isinstance(element, Problem)]
    assert [problem.reason.value for problem in problems] == ["unreadable", "unreadable"]
    assert "No such file" in problems[0].detail
    assert "no *.jsonl" in problems[1].detail
    assert len(found) == 6


def test_line_over_the_limit_is_passed_over(tmp_path: Path) -> None:
    long = {**TALK, "session_id": "x" * 500}
    path = write_lines(tmp_path / "any.jsonl", [long, TALK, long])
    found = list(read_recordings([path], max_line_bytes=400))
    assert [element.line for element in found] == [1, 2, 3]
    assert [isinstance(element, Problem) for element in found] == [True, False, True]


def _peak(path: Path) -> int:
    tracemalloc.start()
    count = sum(1 for _ in read_recordings([path]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == len(path.read_bytes().splitlines())
    return peak


def test_memory_is_that_of_one_session_however_many_there_are(tmp_path: Path) -> None:
    line = AIRLINE.read_bytes().splitlines()[0]
    peaks = []
    for count in (20, 400):
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"\n".join([line] * count))
        peaks.append(_peak(path))
    assert peaks[1] < 1.3 * peaks[0]


def test_memory_of_mixed_records_is_that_of_one_session(tmp_path: Path) -> None:
    """A line costs its place in the file, and not its text."""
    said = [{"role": "user", "content": "x" * 20_000}]
    peaks = []
    for count in (20, 400):
        records = [
            {**RECORD, "session_id": f"s{index % (count // 2)}", "turn": 1 + 2 * index // count}
            for index in range(count)
        ]
        path = tmp_path / f"{count}.jsonl"
        write_lines(path, [{**record, "messages": said} for record in records])
        tracemalloc.start()
        sessions = [len(s.turns) for s in read_recordings([path]) if not isinstance(s, Problem)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sessions == [2] * (count // 2)
    assert peaks[1] < peaks[0] + 400 * 1000


def test_readers_load_no_tokenizer_and_no_store() -> None:
    modules = "opd.replay.recordings.reading, opd.replay.recordings.votes"
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    loaded = set(done.stdout.split())
    assert "opd.replay.recordings.reading" in loaded
    heavy = {"torch", "transformers", "tokenizers", "renderers", "sqlalchemy", "records.store"}
    assert not loaded & heavy


def test_data_names_its_source() -> None:
    assert "sierra-research/tau-bench" in (DATA / "README.md").read_text()
    assert len([json.loads(line) for line in AIRLINE.read_text().splitlines()]) == 4
