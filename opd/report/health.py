"""Health warnings of rollout correction, from rows of metrics.jsonl, for report and terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opd.report.page import Table
from trainer.objectives.rollout_correction.settings import health_warnings


@dataclass(slots=True)
class _Kind:
    newest: str
    last_step: int
    steps: int = 0


def said_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each kind of warning in these rows: the newest of it, and how often it came."""
    return [
        f"step {kind.last_step}: {kind.newest}"
        + (f" ({kind.steps} times since the last line)" if kind.steps > 1 else "")
        for kind in _kinds(rows)
    ]


def health_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table of the run's warnings; none if every step was healthy."""
    kinds = _kinds(rows)
    if not kinds:
        return []
    content = [(kind.newest, str(kind.steps), str(kind.last_step)) for kind in kinds]
    return [
        (
            "Health warnings: what they mean, and what to do, says opd advise",
            ("the newest of its kind", "steps", "last step"),
            content,
        )
    ]


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[_Kind]:
    found: dict[str, _Kind] = {}
    for row in rows:
        numbers = {name: one for name, one in row.items() if isinstance(one, (int, float))}
        for text in health_warnings(numbers):
            kind = found.setdefault(text.partition(" = ")[0], _Kind(text, row["step"]))
            kind.newest, kind.last_step, kind.steps = text, row["step"], kind.steps + 1
    return list(found.values())
