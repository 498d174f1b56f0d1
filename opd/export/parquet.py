"""A Parquet file written in row groups: only the rows of the next group are in memory.

pyarrow is imported when a file is opened, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opd.export.columns import Columns, Kind
from opd.export.jsonl import encode
from records.tables.columns import clean_text

_GROUP_ROWS = 1024
_GROUP_VALUES = 4_000_000
"""Most numbers and characters, together, in a row group."""


class ParquetRows:
    """A Parquet file of these columns. A row is a dict; a column that it lacks is null.

    Kinds: `ids` and `logprobs` are lists of int32 and float32, in which NaN becomes null; `json` is
    JSON as text, for values whose shape differs from row to row; `spans` are lists of three
    numbers; `messages` are lists of OpenAI messages whose content is text (messages.py).
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        import pyarrow
        from pyarrow import parquet

        self._columns = columns
        types = _types(pyarrow)
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in columns])
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting: list[dict[str, Any]] = []
        self._size = 0
        self.num_rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Add one row."""
        shaped = {name: _SHAPES[kind](row.get(name)) for name, kind in self._columns}
        self._waiting.append(shaped)
        self._size += sum(map(_size, shaped.values()))
        self.num_rows += 1
        if len(self._waiting) >= _GROUP_ROWS or self._size >= _GROUP_VALUES:
            self._flush()

    def close(self) -> None:
        """Write the waiting rows and the file's end."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow

        if self._waiting:
            table = pyarrow.table(
                [
                    _column(pyarrow, [row[field.name] for row in self._waiting], field.type)
                    for field in self._schema
                ],
                schema=self._schema,
            )
            self._writer.write_table(table)
        self._waiting, self._size = [], 0


def _types(pyarrow: Any) -> dict[Kind, Any]:
    text, number = pyarrow.string(), pyarrow.int64()
    function = pyarrow.struct([("name", text), ("arguments", text)])
    call = pyarrow.struct([("id", text), ("type", text), ("function", function)])
    message = pyarrow.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", pyarrow.list_(call)),
            ("tool_call_id", text),
            ("name", text),
        ]
    )
    return {
        "text": text,
        "json": text,
        "texts": pyarrow.list_(text),
        "int": number,
        "float": pyarrow.float64(),
        "ids": pyarrow.list_(pyarrow.int32()),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "spans": pyarrow.list_(pyarrow.list_(number)),
        "messages": pyarrow.list_(message),
    }


def _column(pyarrow: Any, values: Sequence[Any], kind: Any) -> Any:
    """Token arrays are passed whole: a Python object for each id takes ten times the memory."""
    if not any(isinstance(value, np.ndarray) for value in values):
        return pyarrow.array(values, type=kind)
    arrays = [np.empty(0, kind.value_type.to_pandas_dtype()) if v is None else v for v in values]
    flat = np.concatenate(arrays)
    absent = np.isnan(flat) if flat.dtype.kind == "f" else None
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets),
        pyarrow.array(flat, type=kind.value_type, mask=absent),
        mask=pyarrow.array([value is None for value in values]),
    )


def _text(value: Any) -> str | None:
    return None if value is None else clean_text(str(value))


def _texts(value: Any) -> list[str] | None:
    return None if value is None else [clean_text(text) for text in value]


def _json(value: Any) -> str | None:
    return None if value is None else encode(value).decode()


def _same(value: Any) -> Any:
    return value


def _messages(value: Any) -> Any:
    return None if value is None else [_cleaned(message) for message in value]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


_SHAPES: dict[Kind, Callable[[Any], Any]] = {
    "text": _text,
    "texts": _texts,
    "json": _json,
    "int": _same,
    "float": _same,
    "ids": _same,
    "logprobs": _same,
    "spans": _same,
    "messages": _messages,
}


def _size(value: Any) -> int:
    if isinstance(value, str | np.ndarray):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 1
