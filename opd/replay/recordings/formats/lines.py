"""The lines of a JSONL file (also of a compressed one: `opened`), one at a time, whatever they are.

A line over the limit is skipped in pieces and never held whole, so a file with a line of a gigabyte
costs no more memory than the limit. Nothing here knows what the lines mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from opd.replay.recordings.formats.opened import UNREADABLE, opened
from opd.replay.recordings.recorded import ImportProblem, Problem

MAX_LINE_BYTES = 64 * 2**20
"""The longest line that is read, without its line end."""
_PIECE = 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line with a JSON object: its number from 1, its first byte, and the object."""

    number: int
    offset: int
    value: dict[str, Any]


def read_lines(path: Path, limit: int = MAX_LINE_BYTES) -> Iterator[Line | Problem]:
    """The JSON objects of `path` in order, and a Problem for each line that is not one.

    Blank lines are skipped. A file that cannot be read gives one Problem without a line.
    """
    source = str(path)
    try:
        with opened(path) as file:
            for number, offset, data in _raw_lines(file, limit):
                read = _parsed(source, number, offset, data, limit)
                if read is not None:
                    yield read
    except UNREADABLE as error:
        detail = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        yield Problem(source=source, reason=ImportProblem.UNREADABLE, detail=detail)


def read_line_at(file: BinaryIO, offset: int) -> dict[str, Any]:
    """The object of a line that `read_lines` gave, read again from its first byte."""
    file.seek(offset)
    return orjson.loads(file.readline())


def _raw_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Number, offset and bytes of each line; None instead of the bytes of one over the limit."""
    number, offset = 0, 0
    while data := file.readline(limit + 1):
        number += 1
        size = len(data)
        if size > limit and not data.endswith(b"\n"):
            del data
            size += _pass_over(file)
            yield number, offset, None
        else:
            start = len(_BOM) if number == 1 and data.startswith(_BOM) else 0
            yield number, offset + start, data[start:]
        offset += size


def _pass_over(file: BinaryIO) -> int:
    """Read to the end of the line; returns how many bytes were left."""
    passed = 0
    while piece := file.readline(_PIECE):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed


def _parsed(
    source: str, number: int, offset: int, data: bytes | None, limit: int
) -> Line | Problem | None:
    def problem(reason: ImportProblem, detail: str) -> Problem:
        return Problem(source=source, line=number, reason=reason, detail=detail)

    if data is None:
        detail = f"longer than {limit} bytes, skipped unread"
        return problem(ImportProblem.LINE_TOO_LONG, detail)
    if not data.strip():
        return None
    try:
        data.decode("utf-8")
        value = orjson.loads(data)
    except UnicodeDecodeError as error:
        return problem(ImportProblem.NOT_UTF8, f"byte {error.start} of the line is not UTF-8")
    except orjson.JSONDecodeError as error:
        return problem(ImportProblem.NOT_JSON, f"at character {error.pos + 1}: {error.msg}")
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        return problem(ImportProblem.BAD_SHAPE, f"a JSON object is expected, not {kind}")
    return Line(number=number, offset=offset, value=value)
