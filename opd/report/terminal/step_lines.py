"""The steps of a run that serves, each as one line of a terminal, from RUN/metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_bridge.rehearsal.last_line import METRICS_FILE


class StepLines:
    """Steps that are new since this was created, or last asked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._read_to = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> list[str]:
        """A line for each; an unfinished one is reported when it is complete."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            part = file.read()
        end = part.rfind(b"\n") + 1
        self._read_to += end
        return [shown_step(json.loads(line)) for line in part[:end].splitlines()]


def shown_step(row: Mapping[str, Any]) -> str:
    """One attempt, from its line of metrics.jsonl; a figure that was not measured is left out."""
    if row["skipped"] is not None:
        return f"no step: the batch was dropped ({row['skipped']})"
    turns, samples = row["turns/live"], row["turns"]
    parts = [f"{samples:.0f} samples ({turns:.0f} turns of agents)"]
    for name, text in (
        ("loss", "loss {:.3g}"),
        ("hints/gap", "gap {:.3g} nats"),
        ("hints/obedience", "open wishes done {:.2f}"),
        ("staleness_max", "at most {:.0f} versions stale"),
    ):
        if (value := row.get(name)) is not None:
            parts.append(text.format(value))
    return f"step {row['step']}, version {row['version']}: {', '.join(parts)}, " + (
        f"{row['seconds/step']:.1f} s"
    )
