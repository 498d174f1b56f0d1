"""JSON lines: values with token arrays, written piece by piece, so that no whole line is in memory.

A number that is NaN or infinite is written as null, like a missing value.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson


def encode(value: Any) -> bytes:
    """`value` as one line of UTF-8 JSON, without the line's end. Float32 numbers are as short as
    possible while reading back the same; unpaired surrogates, which no reader accepts, become
    U+FFFD.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # Surrogates, and numbers of more than 64 bits, which agents do send.
        return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, np.ndarray):
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLines:
    """A file of one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.num_rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Add one object."""
        self._file.write(encode(row) + b"\n")
        self.num_rows += 1

    def close(self) -> None:
        """End the file."""
        self._file.close()


class SessionLines:
    """A file of one session per line, whose turns are written one at a time, each as JSON text:
    what agents send fits no column type. A session without turns gets no line.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._num_turns = 0
        self.num_rows = 0

    def turn(self, head: dict[str, Any], turn: dict[str, Any]) -> None:
        """Add a turn to the session that is being written; its first one begins it with `head`."""
        first = encode(head)[:-1] + b',"turns":[' if not self._num_turns else b","
        self._file.write(first + encode(encode(turn).decode()))
        self._num_turns += 1

    def end(self, tail: dict[str, Any]) -> None:
        """End the session with the fields that are known only now."""
        if self._num_turns:
            self._file.write(b"]," + encode(tail)[1:] + b"\n")
            self.num_rows += 1
        self._num_turns = 0

    def close(self) -> None:
        """End the file."""
        self._file.close()
