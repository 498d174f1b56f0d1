"""Column types: how Python values are stored, the same on SQLite and PostgreSQL.

It knows encodings, but no tables. Text from models and users may contain NUL or unpaired
surrogates, which PostgreSQL (NUL) and UTF-8 (surrogates) refuse: JSON columns escape them, text
columns replace them with U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any

from sqlalchemy import Dialect, Enum, LargeBinary, Text, TypeDecorator

from records.tables.arrays import (
    experts_from_bytes,
    experts_to_bytes,
    halves_from_bytes,
    halves_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_from_bytes,
    logprobs_to_bytes,
)

_READABLE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


def dump_json(value: Any) -> str:
    """Compact JSON text that can be encoded as UTF-8; non-ASCII text stays readable if possible."""
    text = _READABLE.encode(value)
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _ASCII.encode(value)
    return text


def content_hash(value: Any) -> str:
    """Hex SHA-256 of a JSON value's stored form."""
    return hashlib.sha256(dump_json(value).encode()).hexdigest()


def clean_text(text: str) -> str:
    """`text` with U+FFFD for what no database column accepts: NUL and unpaired surrogates."""
    return (
        text.replace("\x00", "\ufffd")
        .encode("utf-16-le", "surrogatepass")
        .decode("utf-16-le", "replace")
    )


class JsonText(TypeDecorator[Any]):
    """A JSON value as text; Python None is SQL NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else dump_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class CleanText(TypeDecorator[str]):
    """Text with `clean_text` applied, in comparisons too."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else clean_text(value)


class IdsBlob(TypeDecorator[Any]):
    """int32 ids [T] as little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else ids_to_bytes(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else ids_from_bytes(value)


class LogprobsBlob(TypeDecorator[Any]):
    """float32 log-probs [T] as little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else logprobs_to_bytes(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else logprobs_from_bytes(value)


class HalvesBlob(TypeDecorator[Any]):
    """Numbers [T] as little-endian float16; float32 in Python."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else halves_to_bytes(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else halves_from_bytes(value)


class ExpertsBlob(TypeDecorator[Any]):
    """int16 or int32 expert numbers [T, layers, topk] as bytes that know their shape."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else experts_to_bytes(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else experts_from_bytes(value)


def enum_column(kind: type[StrEnum]) -> Enum:
    """A StrEnum by value in a text column; an unknown value is refused on the way in."""
    return Enum(
        kind,
        native_enum=False,
        length=32,
        validate_strings=True,
        values_callable=lambda members: [member.value for member in members],
    )
