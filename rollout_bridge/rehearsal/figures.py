"""The results of a measured version, as figures with names: for metrics, terminal and summary."""

from __future__ import annotations

from collections.abc import Sequence

from records.hints.types import HintStatus
from rollout_bridge.rehearsal.journal import MeasuredHint, VersionRow


def figures(row: VersionRow | None) -> dict[str, float]:
    """By name; what was not measured has none. Gaps are means over active hints: `gap` at held-back
    states, `gap_where_trained` for hints that have too few states to hold some back.
    """
    if row is None:
        return {}
    found: dict[str, float | None] = {
        "measured_version": row.version,
        "gap": _mean_gap(row.hints, held_back=True),
        "gap_where_trained": _mean_gap(row.hints, held_back=False),
        "keep_gap": None if row.keep is None else row.keep.value,
        "turns": row.turns,
        "objections": row.objections,
    }
    if row.pooled is not None:
        found |= {
            "obedience": row.pooled.value,
            "obedience_low": row.pooled.low,
            "obedience_high": row.pooled.high,
            "obedience_start": row.pooled.before,
            "obedience_floor": row.pooled.floor,
        }
    return {name: value for name, value in found.items() if value is not None}


def _mean_gap(hints: Sequence[MeasuredHint], *, held_back: bool) -> float | None:
    gaps = [
        one.gap.value
        for one in hints
        if one.gap is not None and one.status is HintStatus.ACTIVE and one.held_back is held_back
    ]
    return sum(gaps) / len(gaps) if gaps else None
