"""The fields of a request that its client may read again with the reply, kept with the turn.

Only a client of the same scope may; erasing them leaves the turn and its training as they are.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, update

from records.tables.models import TurnRow
from records.tables.sql import table_of


def load(connection: Connection, scope: str, turn_id: str) -> dict[str, Any] | None:
    """The echo of a turn; None if there is no such turn in this scope, or it has none."""
    return connection.scalar(
        select(TurnRow.request_echo).where(TurnRow.turn_id == turn_id, TurnRow.scope == scope)
    )


def erase_op(connection: Connection, scope: str, turn_id: str) -> bool:
    """Erase the echo of a turn; False if there was none in this scope."""
    table = table_of(TurnRow)
    erased = connection.execute(
        update(table)
        .where(
            TurnRow.turn_id == turn_id,
            TurnRow.scope == scope,
            TurnRow.request_echo.is_not(None),
        )
        .values(request_echo=None)
    )
    return erased.rowcount == 1
