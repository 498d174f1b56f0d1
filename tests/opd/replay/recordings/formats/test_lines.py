from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import assume, given
from hypothesis import strategies as st

from opd.replay.recordings.formats.lines import Line, read_line_at, read_lines
from opd.replay.recordings.recorded import ImportProblem, Problem

VALUES = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=9), max_size=4)
JSON_LINES = VALUES.map(lambda value: json.dumps(value, ensure_ascii=False).encode())
JUNK = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))


@given(st.lists(JSON_LINES | JUNK, max_size=12), st.integers(1, 60), st.sampled_from([b"", b"\n"]))
def test_every_line_is_an_object_a_problem_or_blank(
    lines: list[bytes], limit: int, end: bytes
) -> None:
    data = b"\n".join(lines) + end
    # A file that begins so is compressed, or read as one array; test_opened.py has those.
    assume(not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")))
    assume(not data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))
    with TemporaryDirectory() as folder:
        path = Path(folder, "lines.jsonl")
        path.write_bytes(data)
        found = list(read_lines(path, limit))
        with path.open("rb") as file:
            again = {
                line.number: read_line_at(file, line.offset)
                for line in found
                if isinstance(line, Line)
            }

    numbers = [line.number if isinstance(line, Line) else line.line for line in found]
    assert numbers == sorted(set(numbers))
    by_number = dict(zip(numbers, found, strict=True))
    for number, line in enumerate(data.split(b"\n"), start=1):
        result = by_number.pop(number, None)
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if len(line) > limit:
            assert isinstance(result, Problem)
            assert result.reason is ImportProblem.LINE_TOO_LONG
        elif not text.strip():
            assert result is None
        elif isinstance(result, Line):
            assert result.value == json.loads(text)
            assert again[number] == result.value
        else:
            assert isinstance(result, Problem)
            assert result.reason in (
                ImportProblem.NOT_UTF8,
                ImportProblem.NOT_JSON,
                ImportProblem.BAD_SHAPE,
            )
    assert not by_number


def test_each_bad_line_is_named_with_its_number_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"first": 1}\r\n'
        b'{"text": "\xff"}\n'
        b'{"open": \n'
        b"[1, 2]\n"
        b"null\n"
        b'{"reward": NaN}\n' + b"[" * 5000 + b"]" * 5000 + b"\n"
        b'{"lone": "\\ud800"}\n'
        b'\n{"last": 1}'
    )

    found = list(read_lines(path))

    values = [line.value for line in found if isinstance(line, Line)]
    assert values == [{"first": 1}, {"last": 1}]
    assert [(line.line, line.reason.value) for line in found if isinstance(line, Problem)] == [
        (2, "not_utf8"),
        (3, "not_json"),
        (4, "bad_shape"),
        (5, "bad_shape"),
        (6, "not_json"),
        (7, "not_json"),
        (8, "not_json"),
    ]
    assert str(found[1]) == f"{path}:2: not_utf8: byte 10 of the line is not UTF-8"


def test_line_over_the_limit_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"before": 1}\n')
        file.seek(300 * 2**20, 1)  # a hole: no disk is used
        file.write(b'\n{"after": 1}\n')

    tracemalloc.start()
    found = list(read_lines(path, limit=2**20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [line.value for line in found if isinstance(line, Line)] == [
        {"before": 1},
        {"after": 1},
    ]
    assert [(line.line, line.reason) for line in found if isinstance(line, Problem)] == [
        (2, ImportProblem.LINE_TOO_LONG)
    ]
    assert peak < 6 * 2**20


def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (problem,) = read_lines(tmp_path / "missing.jsonl")
    assert isinstance(problem, Problem)
    assert problem.reason is ImportProblem.UNREADABLE
    assert problem.line is None
