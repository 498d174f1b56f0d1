"""RUN/summary.json: whether a run learns and what became of its traffic, in numbers for programs.

The report shows the same to people (`opd.report.run_report`). What was not measured is null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.rehearsal.reported import objections_per_100
from opd.rehearsal.saying import MOST_HINTS
from opd.report.terminal.held import held_summary
from records.hints.types import Hint
from records.lessons.names import LessonKind
from records.reading.drop_words import DROP_WORDS, LESSON_WORDS
from records.store import Store
from rollout_bridge.rehearsal.journal import VersionRow, read_rows
from rollout_bridge.stop_order import why_stopped

FILE = "summary.json"


async def write_run_summary(
    folder: Path, store: Store, steps: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the summary of the run as it is now, whole or not at all; `steps` are the rows of
    metrics.jsonl.
    """
    summary = await run_summary(folder, store, steps)
    path = folder / FILE
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return summary


async def run_summary(
    folder: Path, store: Store, steps: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A run's results, ready for JSON."""
    latest = await store.latest_version()
    lessons, rules = await store.lesson_counts(), await store.hint_rules()
    trained = await store.lessons_trained_by_hint()
    return {
        "policy_version": latest.version if latest is not None else 0,
        "training_stopped": why_stopped(folder),
        "steps": _steps(steps),
        "turns": {state.value: number for state, number in (await store.counts()).items()},
        "judged_share": await store.judged_share(),
        "turns_dropped": {
            reason.value: {"turns": number, "why": DROP_WORDS[reason]}
            for reason, number in (await store.drops()).items()
        },
        "hints_counted": [
            {"status": status.value, "not_rehearsed": block and block.value, "hints": number}
            for (status, block), number in (await store.hint_counts()).items()
        ],
        "hints_asked_whether_a_rule": {
            "yes": rules.get(True, 0),
            "no": rules.get(False, 0),
            "not_asked_yet": rules.get(None, 0),
        },
        # The newest.
        "hints": [
            _hint(one) | {"lessons_trained": _by_kind(trained.get(one.hint_id, {}))}
            for one in await store.hints(limit=MOST_HINTS)
        ],
        "lessons_on_their_way": {
            f"{kind.value} {state.value}": number for (kind, state), number in lessons.items()
        },
        "lessons_dropped": {
            reason.value: {"lessons": number, "why": LESSON_WORDS[reason]}
            for reason, number in (await store.lesson_drops()).items()
        },
        "measured": _measured(read_rows(folder)),
    }


def _by_kind(trained: Mapping[LessonKind, int]) -> dict[str, int]:
    """Of the kinds that a hint's lessons have."""
    return {kind.value: trained.get(kind, 0) for kind in (LessonKind.HINT, LessonKind.COUNTER)}


def _steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    trained = [row for row in rows if row.get("skipped") is None]
    last = trained[-1] if trained else {}
    return {
        "trained": len(trained),
        "skipped": len(rows) - len(trained),
        "lessons": {
            kind.value: int(sum(row.get(f"lessons/{kind.value}") or 0 for row in trained))
            for kind in LessonKind
        },
        # In versions, of the last step.
        "staleness_mean": last.get("staleness_mean"),
        "staleness_max": last.get("staleness_max"),
        "generation_held": held_summary(rows),
    }


def _hint(hint: Hint) -> dict[str, Any]:
    return {
        "id": hint.hint_id,
        "text": hint.text,
        "status": hint.status.value,
        "not_rehearsed": None if hint.block is None else hint.block.value,
        "detail": hint.detail,
        "confirmed": hint.num_confirmed,
        "steps": hint.num_steps,
        "first_gap": hint.first_gap,
        "gap": hint.gap,
        "gap_high": hint.gap_high,
    }


def _measured(rows: Sequence[VersionRow]) -> dict[str, Any] | None:
    """At the newest version that was measured; objections by version."""
    if not rows:
        return None
    last = rows[-1]
    return {
        "version": last.version,
        "objections_per_100_turns": [
            {"version": row.version, "objections": share}
            for row, share in zip(rows, objections_per_100(rows), strict=True)
        ],
        "obedience": None if last.pooled is None else last.pooled.model_dump(),
        "obedience_of_hints": {
            hint_id: one.model_dump() for hint_id, one in last.obedience_of.items()
        },
        "obedience_not_guarded": {
            hint_id: one.model_dump() for hint_id, one in last.unguarded_of.items()
        },
        "obedience_not_measurable": list(last.unmeasured),
        "uptake": {
            one.hint_id: one.model_dump(include={"done", "done_start", "done_hinted"})
            for one in last.hints
            if one.done is not None
        },
        "gap_at_other_states": None if last.keep is None else last.keep.model_dump(),
    }
