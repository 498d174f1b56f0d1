"""SQLite's index of texts: FTS5 tables for PART_NUMBERS turns each.

FTS5 keeps the words of a deleted row until it rewrites what contains them. (From SQLite 3.42 on, it
can take them out at once; older ones cannot read such an index any more.) So a table is rewritten
after a deletion, in small steps. With tables of bounded size that costs the same in a store of any
size. `turn_words_parts` names the tables, and those that are to be rewritten, so that another
process finishes what one that died has begun.

Call these functions in one transaction, or one look at the database: parts come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from sqlalchemy import Connection

PART_NUMBERS = 16_384
"""Numbers of turns that one table has."""
_MERGED_PAGES = 200
"""Pages of the index that one transaction rewrites: it takes some milliseconds."""
_LAST = 2**63 - 1


def table_of_part(part: int) -> str:
    """The table of a part."""
    return f"turn_words_{part}"


def parts(connection: Connection, before: int = _LAST) -> list[int]:
    """The parts with numbers below `before`, newest first."""
    statement = "SELECT part FROM turn_words_parts WHERE part <= ? ORDER BY part DESC"
    rows = connection.exec_driver_sql(statement, ((before - 1) // PART_NUMBERS,))
    return list(rows.scalars())


def made(connection: Connection, part: int) -> str:
    """The table of a part, which is there when this returns."""
    note = "INSERT OR IGNORE INTO turn_words_parts(part, is_clean) VALUES (?, 1)"
    if connection.exec_driver_sql(note, (part,)).rowcount:
        connection.exec_driver_sql(f"CREATE VIRTUAL TABLE {table_of_part(part)} USING fts5(words)")
    return table_of_part(part)


def insert(connection: Connection, words: Mapping[int, str]) -> None:
    """Index the words of turns, by their numbers."""
    for part, numbers in _by_part(words):
        rows = [(number, words[number]) for number in numbers]
        table = made(connection, part)
        connection.exec_driver_sql(f"INSERT INTO {table}(rowid, words) VALUES (?, ?)", rows)


def delete(connection: Connection, numbers: Iterable[int]) -> None:
    """Turns of these numbers are not found any more; `shrink_op` must follow."""
    there = set(parts(connection))
    for part, among in _by_part(numbers):
        if part not in there:
            continue
        marks = ", ".join("?" * len(among))
        table = table_of_part(part)
        connection.exec_driver_sql(f"DELETE FROM {table} WHERE rowid IN ({marks})", tuple(among))
        connection.exec_driver_sql(
            "UPDATE turn_words_parts SET is_clean = 0 WHERE part = ?", (part,)
        )


def matches(connection: Connection, query: str, after: int | None, most: int) -> list[int]:
    """Numbers of the newest turns before `after` that match a query of FTS5."""
    before = _LAST if after is None else after
    found: list[int] = []
    for part in parts(connection, before):
        table = table_of_part(part)
        rows = connection.exec_driver_sql(
            f"SELECT rowid FROM {table} WHERE {table} MATCH ? AND rowid < ? "
            "ORDER BY rowid DESC LIMIT ?",
            (query, before, most - len(found)),
        )
        found += rows.scalars()
        if len(found) == most:
            break
    return found


def has_deleted(connection: Connection) -> bool:
    """Whether words of deleted turns are still to be taken out of the index."""
    return _to_clean(connection) is not None


def shrink_op(connection: Connection) -> bool:
    """Rewrite a piece of the index without the words of deleted turns, and drop a part that has no
    turns left; returns whether there may be more to do.
    """
    part = _to_clean(connection)
    if part is None:
        return False
    table = table_of_part(part)
    connection.exec_driver_sql("PRAGMA secure_delete=ON")
    before = connection.exec_driver_sql("SELECT total_changes()").scalar_one()
    connection.exec_driver_sql(
        f"INSERT INTO {table}({table}, rank) VALUES ('merge', -{_MERGED_PAGES})"
    )
    # As FTS5's documentation says: less than 2 where nothing was merged.
    if connection.exec_driver_sql("SELECT total_changes()").scalar_one() - before >= 2:
        return True
    if connection.exec_driver_sql(f"SELECT rowid FROM {table} LIMIT 1").first() is None:
        connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.exec_driver_sql("DELETE FROM turn_words_parts WHERE part = ?", (part,))
    else:
        connection.exec_driver_sql(
            "UPDATE turn_words_parts SET is_clean = 1 WHERE part = ?", (part,)
        )
    return True


def _to_clean(connection: Connection) -> int | None:
    statement = "SELECT part FROM turn_words_parts WHERE NOT is_clean ORDER BY part LIMIT 1"
    return connection.exec_driver_sql(statement).scalar()


def _by_part(numbers: Iterable[int]) -> list[tuple[int, Sequence[int]]]:
    grouped = groupby(sorted(numbers), lambda number: number // PART_NUMBERS)
    return [(part, list(among)) for part, among in grouped]
