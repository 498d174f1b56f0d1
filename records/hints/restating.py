"""A turn's hint after the teacher has read its answer: a candidate that speaks against it.

A judge that misreads a turn in one vote may read it correctly in another. The votes stay as they
were cast; the verdict and the memory follow what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, select, update

from records.hints.memory import add_hints, end_sourceless, look_again
from records.hints.rows import HintRow, HintSourceRow
from records.tables.columns import clean_text
from records.tables.models import VerdictRow
from records.tables.sql import upsert

_SOURCES = select(HintSourceRow.__table__, HintRow.scope).join(
    HintRow, HintRow.hint_id == HintSourceRow.hint_id
)


def restate(connection: Connection, left: Mapping[str, Sequence[str]], now: float) -> None:
    """Reduce each turn's candidates to those that are `left`, at least one. The first becomes the
    turn's hint, and a turn that was a source of its old hint becomes a source of that one.
    """
    if not left:
        return
    for turn_id, hints in left.items():
        candidates = [clean_text(hint) for hint in hints]
        connection.execute(
            update(VerdictRow)
            .where(VerdictRow.turn_id == turn_id)
            .values(hint=candidates[0], candidates=candidates)
        )
    among = HintSourceRow.turn_id.in_(list(left))
    before = [row._asdict() for row in connection.execute(_SOURCES.where(among))]
    wanted = {row["turn_id"]: (row.pop("scope"), left[row["turn_id"]][0]) for row in before}
    ids = add_hints(connection, wanted, now)
    connection.execute(delete(HintSourceRow).where(among))
    upsert(
        connection,
        HintSourceRow,
        [
            row | {"hint_id": ids[row["turn_id"]], "text": wanted[row["turn_id"]][1]}
            for row in before
        ],
    )
    end_sourceless(connection, {row["hint_id"] for row in before}, now)
    look_again(connection, set(ids.values()))
