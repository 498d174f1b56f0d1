"""Small helpers for SQLite and PostgreSQL alike: upserts, bounded IN lists, tables by model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable, Row, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

T = TypeVar("T")

MAX_IN = 500
"""Maximum values in one IN list: far below what either database accepts."""


def chunks(values: Sequence[T], size: int = MAX_IN) -> Iterator[Sequence[T]]:
    """`values` in order, at most `size` at a time."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def rows_in(
    connection: Connection, statement: Executable, values: Iterable[str], **others: Any
) -> list[Row[Any]]:
    """Rows of a statement with a parameter `values` in an expanding IN, in bounded lists; `others`
    are its other parameters.
    """
    found: list[Row[Any]] = []
    for part in chunks(list(dict.fromkeys(values))):
        found += connection.execute(statement, {"values": part, **others}).all()
    return found


def table_of(model: type[DeclarativeBase]) -> Table:
    """The table of a model: statements on it skip the ORM's handling of attributes."""
    table = model.__table__
    assert isinstance(table, Table)
    return table


def insert_missing(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]]
) -> None:
    """Insert `rows`; existing rows with the same key or unique value are left as they are."""
    if rows:
        connection.execute(_insert_missing(connection.dialect.name, model), rows)


def upsert(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]]
) -> None:
    """Insert `rows`, each with all its columns, in place of those with the same primary key."""
    if rows:
        connection.execute(_upsert(connection.dialect.name, model), rows)


@cache
def _insert_missing(dialect: str, model: type[DeclarativeBase]) -> Any:
    return _insert(dialect, model).on_conflict_do_nothing()


@cache
def _upsert(dialect: str, model: type[DeclarativeBase]) -> Any:
    keys = [column.name for column in table_of(model).primary_key]
    statement = _insert(dialect, model)
    others = [column.name for column in table_of(model).columns if column.name not in keys]
    changed = {name: statement.excluded[name] for name in others}
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


def _insert(dialect: str, model: type[DeclarativeBase]) -> Any:
    table = table_of(model)
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
