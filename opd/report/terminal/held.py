"""How long `trainer.schedule` made requests wait, for terminal and summary."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_bridge.engine.hold_file import HoldFile
from rollout_bridge.rehearsal.last_line import METRICS_FILE, last_line

_ENDED = "hold/ended_"


def held_line(folder: Path) -> str | None:
    """Whether requests wait now, and how long they have waited since the trainer started; None if
    nothing was held yet.
    """
    order = HoldFile(folder).holds()
    line = last_line(folder / METRICS_FILE)
    row: dict[str, Any] = {} if line is None else json.loads(line)
    said = []
    if order is not None:
        said.append(f"for {max(time.time() - order.since, 0.0):.0f} s now, as {order.why}")
    if row.get("hold/total_holds"):
        said.append(
            f"{row['hold/total_holds']:.0f} times for {row['hold/total_seconds']:.1f} s in all, "
            "since the trainer started"
        )
    return f"requests held: {'; '.join(said)}" if said else None


def held_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Totals over all rows of metrics.jsonl; None if the schedule never holds."""
    held = [row for row in rows if row.get("hold/holds") is not None]
    if not held:
        return None
    ends = sorted({name for row in held for name in row if name.startswith(_ENDED)})
    return {
        "seconds": sum(row["hold/seconds"] for row in held),
        "holds": int(sum(row["hold/holds"] for row in held)),
        "by_end": {
            name.removeprefix(_ENDED): int(sum(row.get(name, 0) for row in held)) for name in ends
        },
    }
