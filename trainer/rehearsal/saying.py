"""Whether a run learns, as a line of a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from records.hints.types import Hint, HintStatus
from trainer.rehearsal.journal import VersionRow, last_row
from trainer.stop_order import read_stop

MOST_HINTS = 1000


class HintStore(Protocol):
    """What is asked of the store."""

    async def hints(
        self,
        *,
        scope: str | None = None,
        statuses: Sequence[HintStatus] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Hint]: ...


async def learning_line(store: HintStore, folder: Path) -> str | None:
    """Where the hints stand and what is measured; None while there is neither. Begins with why
    training has stopped, if it has.
    """
    hints = await store.hints(limit=MOST_HINTS)
    order = read_stop(folder)
    said = shown_learning(hints, last_row(folder))
    if order is not None and order.reason:
        return f"training has stopped: {order.reason}" + (f"\n{said}" if said else "")
    return said


def shown_learning(hints: Sequence[Hint], row: VersionRow | None) -> str | None:
    """The line; None where there is nothing to say."""
    if not hints and row is None:
        return None
    by_status = Counter(
        "not practised" if hint.status is HintStatus.ACTIVE and hint.block else hint.status.value
        for hint in hints
    )
    parts = [f"hints: {', '.join(f'{n} {name}' for name, n in by_status.items())}"] if hints else []
    gaps = [(h.first_gap, h.gap) for h in hints if h.first_gap is not None and h.gap is not None]
    if gaps:
        first, now = (sum(values) / len(gaps) for values in zip(*gaps, strict=True))
        parts.append(f"gap {first:.2g} -> {now:.2g} nats")
    if row is not None and row.pooled is not None:
        parts.append(f"open wishes done {row.pooled.value:.2f} (start {row.pooled.before:.2f})")
    if row is not None and row.keep is not None:
        parts.append(f"other states {row.keep.value:.2g} nats from the start")
    return "; ".join(parts)
