"""Small helpers that SQLite and PostgreSQL need alike: upserts and bounded IN lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

T = TypeVar("T")

MAX_IN = 500
"""Values in one IN list: far below what either database takes."""


def chunks(values: Sequence[T], size: int = MAX_IN) -> Iterator[Sequence[T]]:
    """`values` in order, at most `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def insert_missing(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]]
) -> None:
    """Insert `rows`; one whose key or unique value exists already is left as it is."""
    if rows:
        connection.execute(_insert(connection, model).on_conflict_do_nothing(), rows)


def upsert(connection: Connection, model: type[DeclarativeBase], row: dict[str, Any]) -> None:
    """Insert `row`, or replace the values of the row with the same primary key."""
    table = model.__table__
    assert isinstance(table, Table)
    keys = [column.name for column in table.primary_key]
    statement = _insert(connection, model).values(row)
    changed = {name: statement.excluded[name] for name in row if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))


def _insert(connection: Connection, model: type[DeclarativeBase]) -> Any:
    is_sqlite = connection.dialect.name == "sqlite"
    return sqlite.insert(model) if is_sqlite else postgresql.insert(model)
