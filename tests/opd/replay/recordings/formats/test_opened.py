"""Files of recordings as lines: JSON arrays as one line for each element, and packed files."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.replay.recordings.formats.lines import Line, read_line_at, read_lines
from opd.replay.recordings.formats.opened import UNREADABLE, ArrayLines, is_array, opened
from opd.replay.recordings.recorded import ImportProblem, Problem
from tests.linear_time import growth


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstd,
}
STRUCTURAL = st.text(alphabet='a"\\,[]{}:\n\r\t é\u2028', max_size=9)
# Lines are read by orjson, which keeps integers of 64 bits; larger ones become floats.
INTEGERS = st.integers(-(2**63), 2**64 - 1)
ELEMENTS = st.recursive(
    st.none() | st.booleans() | INTEGERS | STRUCTURAL,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(STRUCTURAL, below, max_size=4),
    max_leaves=8,
)
ARRAYS = st.lists(ELEMENTS, max_size=6)
BLANKS = st.text(alphabet=" \t\r\n", max_size=3)


def as_lines(text: bytes, piece: int = 9) -> bytes:
    reader = ArrayLines(io.BytesIO(text))
    out = b""
    while part := reader.read(piece):
        out += part
    return out


def objects(path: Path) -> list[Any]:
    return [found.value for found in read_lines(path) if isinstance(found, Line)]


def reasons(path: Path) -> list[str]:
    return [found.reason.value for found in read_lines(path) if isinstance(found, Problem)]


@given(ARRAYS, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 9))
def test_any_array_becomes_a_line_for_each_element(
    values: list[Any], indent: int | None, ascii_only: bool, piece: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    out = as_lines(text, piece)
    assert len(out) == len(text)
    assert [json.loads(line) for line in out.split(b"\n") if line.strip()] == values


@given(
    ARRAYS,
    st.lists(st.dictionaries(STRUCTURAL, ELEMENTS, max_size=3), max_size=3),
    st.sampled_from([None, 1]),
    BLANKS,
    st.sampled_from(list(PACKINGS)),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_a_file_with_an_array_holds_the_objects_that_json_finds_in_it(
    values: list[Any],
    after: list[dict[str, Any]],
    indent: int | None,
    blanks: str,
    packing: str,
    mark: bytes,
) -> None:
    """Elements that are none are problems; lines after the array's end are lines like any."""
    whole = blanks + json.dumps(values, indent=indent, ensure_ascii=False) + blanks + "\n"
    lines = "".join(json.dumps(value) + "\n" for value in after)
    with TemporaryDirectory() as folder:
        path = Path(folder, "array")
        path.write_bytes(PACKINGS[packing](mark + (whole + lines).encode()))
        assert is_array(path)
        found = list(read_lines(path))
        with opened(path, seekable=True) as file:
            again = [read_line_at(file, line.offset) for line in found if isinstance(line, Line)]
    expected = [*json.loads(whole), *after]
    assert again == [value for value in expected if isinstance(value, dict)]
    assert len(found) == len(expected)
    for line, value in zip(found, expected, strict=True):
        if isinstance(value, dict):
            assert isinstance(line, Line)
            assert line.value == value
        else:
            assert isinstance(line, Problem)
            assert line.reason is ImportProblem.BAD_SHAPE


@given(st.binary(max_size=60), st.integers(1, 9))
def test_no_bytes_are_lost_whatever_they_are(data: bytes, piece: int) -> None:
    out = as_lines(b"[" + data, piece)
    assert len(out) == len(data) + 1
    changed = {(old, new) for old, new in zip(b"[" + data, out, strict=True) if old != new}
    assert {bytes([old]) for old, _ in changed} <= {b"[", b"]", b",", b"\r", b"\n"}
    assert {bytes([new]) for _, new in changed} <= {b" ", b"\n"}


@pytest.mark.parametrize(
    ("text", "values", "problems"),
    [
        (b"[]", [], []),
        (b'[{"a": 1},]', [{"a": 1}], []),
        (b'[{"a": 1}, {"b": ', [{"a": 1}], ["not_json"]),
        (b'[{"a": "\xff"}, {"b": 2}]', [{"b": 2}], ["not_utf8"]),
        (b'[{"a": NaN}, [{"c": 3}], {"b": 2}]', [{"b": 2}], ["not_json", "bad_shape"]),
        (b'[{"a": 1} {"b": 2}, {"c": 3}]', [{"c": 3}], ["not_json"]),
        (b'[{"a": 1}] and more\n{"b": 2, "c": [3, 4]}', [{"a": 1}, {"b": 2, "c": [3, 4]}], None),
        (b'[{"a": 1}]\n[{"b": 2}, {"c": 3}]', [{"a": 1}, {"b": 2}, {"c": 3}], []),
        (b'[1, 2]\n{"b": 2, "c": 3}\n{"d": [\n4]}', [{"b": 2, "c": 3}, {"d": [4]}], None),
        (b'[2, 3]]\n{"a": 1, "b": [2, 3]}\n{"c": 3}', [{"a": 1, "b": [2, 3]}, {"c": 3}], None),
    ],
)
def test_junk_in_and_after_an_array_takes_nothing_else_with_it(
    tmp_path: Path, text: bytes, values: list[Any], problems: list[str] | None
) -> None:
    path = tmp_path / "array.json"
    path.write_bytes(text)
    assert objects(path) == values
    if problems is not None:
        assert reasons(path) == problems
    else:
        assert reasons(path)


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_packed_files_that_were_put_one_behind_the_other_are_one(
    tmp_path: Path, packing: str
) -> None:
    path = tmp_path / packing
    pack = PACKINGS[packing]
    path.write_bytes(pack(b'{"a": 1}\n') + pack(b"") + pack(b'{"b": 2}\n'))
    assert objects(path) == [{"a": 1}, {"b": 2}]
    assert reasons(path) == []


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
@pytest.mark.parametrize("shape", ["lines", "array"])
def test_a_packed_file_that_is_damaged_is_told_behind_what_it_holds(
    tmp_path: Path, packing: str, shape: str
) -> None:
    ends = {"lines": (b"", b"\n"), "array": (b"[", b",")}[shape]
    data = bytearray(
        PACKINGS[packing](ends[0] + ends[1].join(b'{"a": %d}' % at for at in range(99_999)))
    )
    path = tmp_path / packing
    for damaged in (data[: len(data) * 3 // 4], data[:5], data[:-1]):
        path.write_bytes(damaged)
        found = reasons(path)
        assert found[-1:] == ["unreadable"]
        with pytest.raises(UNREADABLE), opened(path, seekable=True):
            pass


def test_an_array_is_unpacked_and_split_without_being_held(tmp_path: Path) -> None:
    element = json.dumps({"text": "x" * 2**20}).encode()
    path = tmp_path / "large.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"[" + b",".join([element] * 64) + b"]")
    tracemalloc.start()
    count = sum(isinstance(line, Line) for line in read_lines(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 64
    assert peak < 24 * 2**20


def test_an_array_takes_time_linear_in_its_elements() -> None:
    def split(count: int) -> Callable[[], None]:
        text = json.dumps([{"role": "user", "content": 'a, "b"\n'}] * count).encode()

        def work() -> None:
            reader = io.BufferedReader(ArrayLines(io.BytesIO(text)), 2**20)
            assert sum(1 for _ in reader) == count

        return work

    assert growth(split(2_000), split(8_000), below=6.6) < 6.6
