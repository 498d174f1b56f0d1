"""The files of an export: sessions, votes, hints and samples, written session by session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from opd.export import columns
from opd.export.jsonl import JsonLines, SessionLines
from opd.export.parquet import ParquetRows
from opd.export.request import ExportRequest, What
from opd.export.rows import (
    Row,
    has_ids,
    hint_rows,
    line_turn,
    sample_rows,
    session_head,
    table_turn,
    vote_rows,
)
from records.reading.exporting import SessionHeader, TurnPlace, places
from records.reading.whole_turns import TURNS_AT_A_TIME, WholeTurn, whole_turns
from records.tables.loading import load_turns
from records.tables.sql import chunks
from records.types import TurnRecord


class Rows(Protocol):
    """A file of rows."""

    num_rows: int

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


_TABLES: dict[What, tuple[columns.Columns, Callable[[WholeTurn], Iterator[Row]]]] = {
    "votes": (columns.VOTES, vote_rows),
    "hints": (columns.HINTS, hint_rows),
    "samples": (columns.SAMPLES, sample_rows),
}


class ExportFiles:
    """The files in `folder`; `renderer` names what made the ids, None leaves ids out.

    Call `read` for each session (it is a `records.reading.exporting.SessionReader`), and `close`.
    """

    def __init__(self, folder: Path, request: ExportRequest, renderer: str | None) -> None:
        self._states = request.wanted.states
        self._renderer = renderer
        self._lines: SessionLines | None = None
        self._turns: Rows | None = None
        self._tables: dict[What, Rows] = {}
        self.num_turns = 0
        suffix = request.file_format
        for what in request.what:
            path = folder / f"{what}.{suffix}"
            if what != "sessions":
                table = _TABLES[what][0]
                is_parquet = suffix == "parquet"
                self._tables[what] = ParquetRows(path, table) if is_parquet else JsonLines(path)
            elif suffix == "parquet":
                self._turns = ParquetRows(path, columns.TURNS)
            else:
                self._lines = SessionLines(path)

    def read(self, connection: Connection, session: SessionHeader) -> None:
        """Write what a session contains."""
        known = places(connection, session.session_id)
        taken = [one for one in known if not self._states or one.state in self._states]
        has_line_ids = False
        for place, whole, parent in _turns(connection, taken):
            self.num_turns += 1
            has_line_ids |= self._renderer is not None and has_ids(whole.turn)
            if self._lines is not None:
                row = line_turn(place, whole, parent, ids=self._renderer is not None)
                self._lines.turn(session_head(session), row)
            if self._turns is not None:
                self._turns.write(table_turn(session, place, whole, self._renderer))
            for what, table in self._tables.items():
                for row in _TABLES[what][1](whole):
                    table.write(row)
        if self._lines is not None:
            self._lines.end({"renderer": (self._renderer or "") if has_line_ids else ""})

    def close(self) -> dict[str, int]:
        """End the files; returns the number of rows of each."""
        files: dict[str, Rows | SessionLines | None] = {
            "sessions": self._lines or self._turns,
            **self._tables,
        }
        there = {name: file for name, file in files.items() if file is not None}
        for file in there.values():
            file.close()
        return {name: file.num_rows for name, file in there.items()}


def _turns(
    connection: Connection, taken: Sequence[TurnPlace]
) -> Iterator[tuple[TurnPlace, WholeTurn, TurnRecord | None]]:
    """The turns, each with its parent if that is among them."""
    names = {place.turn_id for place in taken}
    for part in chunks(taken, TURNS_AT_A_TIME):
        wholes = whole_turns(connection, [place.turn_id for place in part])
        records = {whole.turn.turn_id: whole.turn for whole in wholes}
        above = {place.parent_id for place in part if place.parent_id in names}
        missing = sorted(name for name in above if name is not None and name not in records)
        records |= {turn.turn_id: turn for turn in load_turns(connection, missing)}
        for place, whole in zip(part, wholes, strict=True):
            parent = records.get(place.parent_id) if place.parent_id in names else None
            yield place, whole, parent
