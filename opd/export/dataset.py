"""A folder that `datasets.load_dataset` opens: one Parquet file and the card that describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sqlalchemy import Connection

from opd.export import columns
from opd.export.card import card
from opd.export.choice import (
    LeftOut,
    best_and_worst,
    correction_of,
    why_not_demonstrated,
    why_unusable,
)
from opd.export.messages import NotText, plain_messages
from opd.export.parquet import ParquetRows
from opd.export.request import Dataset
from opd.export.rows import Row
from records.messages import Message
from records.reading.exporting import SessionHeader, Wanted, places
from records.reading.rated import RatedTurn, by_prompt, rated_turns
from records.reading.whole_turns import TURNS_AT_A_TIME, WholeTurn, whole_turns
from records.tables.sql import chunks
from records.types import TurnRecord

FILE = "data/train-00000-of-00001.parquet"
"""As the library names the only file of a split."""


class DatasetFolder:
    """The rows of a data set in `folder`, and how many turns were left out, by reason.

    `marks` are the texts that redaction leaves in place of what it removed.
    """

    def __init__(self, folder: Path, kind: Dataset, marks: frozenset[str]) -> None:
        self._folder = folder
        self._kind: Dataset = kind
        self._marks = marks
        (folder / FILE).parent.mkdir()
        table = columns.PREFERENCE if kind == "preference" else columns.SFT
        self._rows = ParquetRows(folder / FILE, table)
        self.left_out: Counter[LeftOut] = Counter()

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._rows.num_rows

    def close(self) -> None:
        """End the file and write the card."""
        self._rows.close()
        (self._folder / "README.md").write_text(card(self._kind, self.num_rows), encoding="utf-8")

    def read_session(self, connection: Connection, session: SessionHeader) -> None:
        """Add the good answers of a session."""
        names = [place.turn_id for place in places(connection, session.session_id)]
        for whole in wholes(connection, names):
            self.add(why_not_demonstrated(whole) or sft_row(whole.turn))

    def read_preferences(
        self, connection: Connection, wanted: Wanted, on_done: Callable[[int, int], None]
    ) -> None:
        """Add all preferences; `on_done(turns, of_all)` after each prompt."""
        rated = rated_turns(connection, wanted)
        usable: list[RatedTurn] = []
        for turn in rated:
            reason = why_unusable(
                turn.turn_type,
                turn.drop_reason,
                turn.finish_reason,
                is_held_out=turn.is_held_out,
            )
            if reason is None:
                usable.append(turn)
            else:
                self.add(reason)
        num_done = len(rated) - len(usable)
        for turns in by_prompt(usable):
            self._add_prompt(connection, turns)
            num_done += len(turns)
            on_done(num_done, len(rated))

    def _add_prompt(self, connection: Connection, turns: Sequence[RatedTurn]) -> None:
        pair = best_and_worst(turns)
        in_pair: list[str] = []
        if not isinstance(pair, LeftOut):
            in_pair = [turn.turn_id for turn in pair]
            best, worst = whole_turns(connection, in_pair)
            self.add(scored_row(best.turn, worst.turn))
        for whole in wholes(connection, [turn.turn_id for turn in turns]):
            answer = correction_of(whole, self._marks)
            if not isinstance(answer, LeftOut):
                self.add(corrected_row(whole.turn, answer))
            elif answer is LeftOut.NO_PAIR and isinstance(pair, LeftOut):
                self.add(pair)
            elif whole.turn.turn_id not in in_pair:
                self.add(answer)

    def add(self, row: Row | LeftOut) -> None:
        """Write a row, or count why there is none."""
        if isinstance(row, LeftOut):
            self.left_out[row] += 1
        else:
            self._rows.write(row)


def sft_row(turn: TurnRecord) -> Row | LeftOut:
    """A conversation that ends with a good answer."""
    try:
        messages = plain_messages([*turn.messages, turn.response])
    except NotText:
        return LeftOut.NOT_TEXT
    return {"messages": messages, **_names(turn)}


def scored_row(best: TurnRecord, worst: TurnRecord) -> Row | LeftOut:
    """The answer with the highest score against the one with the lowest, for one prompt."""
    row = _preference(best, best.response, worst.response)
    if isinstance(row, LeftOut):
        return row
    rejected = {"rejected_turn_id": worst.turn_id, "rejected_session_id": worst.session_id}
    return {**row, "source": "scores", **rejected}


def corrected_row(turn: TurnRecord, answer: str) -> Row | LeftOut:
    """The corrected answer against the original one."""
    row = _preference(turn, {"role": "assistant", "content": answer}, turn.response)
    return row if isinstance(row, LeftOut) else {**row, "source": "correction"}


def _preference(turn: TurnRecord, chosen: Message, rejected: Message) -> Row | LeftOut:
    try:
        return {
            "prompt": plain_messages(turn.messages),
            "chosen": plain_messages([chosen]),
            "rejected": plain_messages([rejected]),
            **_names(turn),
        }
    except NotText:
        return LeftOut.NOT_TEXT


def _names(turn: TurnRecord) -> Row:
    return {
        "tools": turn.tools or None,
        "turn_id": turn.turn_id,
        "session_id": turn.session_id,
        "data_source": turn.data_source,
    }


def wholes(connection: Connection, turn_ids: Sequence[str]) -> Iterator[WholeTurn]:
    for part in chunks(turn_ids, TURNS_AT_A_TIME):
        yield from whole_turns(connection, part)
