"""A file of recordings as bytes with one JSON value per line, compressed or not.

gzip and zstd are decompressed, and the elements of a JSON array become lines, all of it while
reading: nothing is held whole. It does not know what the values mean.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a damaged or missing file raises."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_PIECE = 2**20
_STRUCTURE = re.compile(rb'["\\,\[\]{}\r\n]')


@contextmanager
def opened(path: Path, *, seekable: bool = False) -> Iterator[BinaryIO]:
    """The lines of `path`. With `seekable`, decompressed or split ones can be read at an offset
    too: they are then copied to a temporary file. Raises one of UNREADABLE.
    """
    with path.open("rb") as file:
        source: BinaryIO = _unpacked(file)
        is_array = _begins_with_array(source)
        lines = (
            cast(BinaryIO, io.BufferedReader(ArrayLines(source), _PIECE)) if is_array else source
        )
        if not seekable or lines is file:
            yield lines
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(lines, copy, _PIECE)
            copy.seek(0)
            yield cast(BinaryIO, copy)


def is_array(path: Path) -> bool:
    """Whether the file is a JSON array, compressed or not."""
    with path.open("rb") as file:
        return _begins_with_array(_unpacked(file))


def _unpacked(file: io.BufferedReader) -> BinaryIO:
    begin = file.peek(len(_ZSTD))
    if begin.startswith(_GZIP):
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file))))
    if begin.startswith(_ZSTD):
        # Here and not above: it takes a moment to import, and few recordings use it.
        import pyarrow

        stream = pyarrow.CompressedInputStream(file, "zstd")
        return cast(BinaryIO, io.BufferedReader(_Raw(stream)))
    return file


def _begins_with_array(source: BinaryIO) -> bool:
    begin = cast(io.BufferedReader, source).peek(_PIECE)
    return begin.removeprefix(_BOM).lstrip().startswith(b"[")


class _Raw(io.RawIOBase):
    """A stream that has only `read`, made readable through a buffer."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class ArrayLines(io.RawIOBase):
    """The text of a JSON array with a line for each element: its brackets become blanks, the commas
    between elements line ends, and line ends within an element blanks. The length stays the same.
    What follows the array is left as it is.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._depth = 0
        self._in_array = False
        self._in_text = False
        self._is_escaped = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = bytearray(self._stream.read(len(buffer)))
        passed = 0 if self._is_escaped and data else -1
        self._is_escaped = self._is_escaped and not data
        for found in _STRUCTURE.finditer(bytes(data)):
            place, what = found.start(), found[0]
            if place == passed:
                continue
            if self._in_text:
                if what == b"\\":
                    passed = place + 1
                elif what == b'"':
                    self._in_text = False
            else:
                self._outside(data, place, what)
        self._is_escaped = self._is_escaped or passed == len(data) > 0
        buffer[: len(data)] = data
        return len(data)

    def _outside(self, data: bytearray, place: int, what: bytes) -> None:
        if what == b'"':
            self._in_text = True
        elif what in b"[{":
            if self._depth == 0:
                self._in_array = what == b"["
                data[place] = ord(" ") if self._in_array else data[place]
            self._depth += 1
        elif what in b"]}":
            self._depth = max(self._depth - 1, 0)  # junk may close what nothing opened
            if self._depth == 0 and what == b"]":
                data[place] = ord("\n")
        elif what == b"," and self._depth == 1 and self._in_array:
            data[place] = ord("\n")
        elif what in b"\r\n" and self._depth:
            data[place] = ord(" ")
