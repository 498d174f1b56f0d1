"""What RUN/rehearsal.jsonl says about one hint, version by version, for the endpoint's pages."""

from __future__ import annotations

import os
from pathlib import Path

from api_proxy.pages.measured import HintVersion
from rollout_bridge.rehearsal.journal import FILE, RateRow, VersionRow

_MOST_BYTES = 4 * 2**20
"""Read from the end, so that a page that somebody waits for does not read a long run from its
start.
"""


def hint_versions(folder: Path, hint_id: str) -> list[HintVersion]:
    """The newest versions at which the hint was measured, oldest first. Reads a file."""
    path = folder / FILE
    if not path.exists():
        return []
    with path.open("rb") as file:
        begin = max(file.seek(0, os.SEEK_END) - _MOST_BYTES, 0)
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    # The first line may be cut, and the last one unfinished.
    whole = [line for line in lines[1 if begin else 0 :] if line.endswith(b"\n")]
    name = hint_id.encode()
    return [
        row
        for line in whole
        if name in line
        for row in _of(VersionRow.model_validate_json(line), hint_id)
    ]


def _of(row: VersionRow, hint_id: str) -> list[HintVersion]:
    measured = [one for one in row.hints if one.hint_id == hint_id]
    wishes = row.obedience_of.get(hint_id) or row.unguarded_of.get(hint_id)
    return [
        HintVersion(
            version=row.version,
            gap=None if one.gap is None else one.gap.value,
            gap_low=None if one.gap is None else one.gap.low,
            gap_high=None if one.gap is None else one.gap.high,
            obeyed=(wishes.followed, wishes.asked) if wishes is not None and wishes.asked else None,
            done=_hits(one.done),
            done_start=_hits(one.done_start),
            done_hinted=_hits(one.done_hinted),
        )
        for one in measured
    ]


def _hits(row: RateRow | None) -> tuple[int, int] | None:
    return None if row is None else (row.hits, row.count)
