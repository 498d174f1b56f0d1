"""What a replay leaves behind: summary.json, report.html, and the lines that it prints."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opd.evaluation.gap import CaseGap, change_of, gap_of
from opd.rehearsal.reported import learning_tables
from opd.rehearsal.saying import MOST_HINTS
from opd.replay.modes import ReplayMode
from opd.replay.story import first_hints, gap_rows, replay_story
from opd.replay.taking_in import ImportReport
from opd.report.curves import metric_rows, training_curves
from opd.report.health import health_tables
from opd.report.page import write_report
from opd.report.run_report import EXAMPLES, example_turns
from opd.report.story import before_and_after, model_name
from records.names import TurnState
from records.reading.replay_status import ReplayStatus
from records.store import Store
from records.turns.recording import RecordingKind
from rollout_bridge.rendering.rendering import Rendering

SUMMARY_FILE = "summary.json"
SHOWN_CHARS = 400
"""Most characters of a problem in a terminal."""
HINTS_SHOWN = 20
"""Most hints in the report."""
STAND_IN = (
    "the recording does not say how probable its responses were when they were sampled: the "
    "policy's own log-probabilities are used instead, so importance weights correct for what the "
    "policy has learned since, not for the difference between it and the model that answered"
)


def build_summary(
    *,
    mode: ReplayMode,
    model: str,
    imported: ImportReport,
    status: ReplayStatus,
    num_updates: int,
    gaps: dict[str, dict[str, list[CaseGap]]],
    timings: dict[str, float],
) -> dict[str, Any]:
    """All counts of a replay; what was not measured is absent, and a share of nothing is None."""
    can_train = status.num_accepted - status.num_held_out
    return {
        "mode": mode,
        "model": model,
        "import": imported.as_dict(),
        "turns": {
            "recorded": status.num_recorded,
            "resampled": status.num_resampled,
            "judged": status.num_judged,
            "accepted": status.num_accepted,
            "accept_rate": _share(status.num_accepted, status.num_judged),
            "scored": status.num_scored,
            "scored_share_of_accepted": _share(status.num_scored, status.num_accepted),
            "held_out": status.num_held_out,
            "trained": status.num_trained,
            "trained_share": _share(status.num_trained, can_train),
            "states": {state.value: number for state, number in status.states.items()},
            "dropped": {reason.value: number for reason, number in status.drops.items()},
            "kinds": {kind.value: number for kind, number in status.kinds.items()},
        },
        "votes": {"all": status.num_votes, "recorded": status.num_votes_recorded},
        "tokens_scored": status.scored_tokens,
        "updates": num_updates,
        "gap": {
            name: {when: asdict(gap_of(cases)) for when, cases in found.items()}
            for name, found in gaps.items()
        },
        "gap_change": {
            name: asdict(change_of(found["before"], found["after"]))
            for name, found in gaps.items()
            if "after" in found
        },
        "note": STAND_IN if num_updates and _trains_on_recorded(mode, status) else None,
        "seconds": timings,
    }


def _trains_on_recorded(mode: ReplayMode, status: ReplayStatus) -> bool:
    """Whether the replay trains on responses recorded without log-probs."""
    return mode == "rescore" and status.kinds.get(RecordingKind.RECORDED, 0) > 0


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """For the terminal."""
    turns, imported = summary["turns"], summary["import"]
    formats = ", ".join(f"{n} {name}" for name, n in imported["formats"].items()) or "no"
    lines = [
        f"imported {formats} sessions: {imported['turns_rendered']} of {imported['turns']} turns "
        f"rendered, {imported['turns_new']} new",
        f"judged {turns['judged']}, accepted {turns['accepted']}, scored {turns['scored']}, "
        f"held out {turns['held_out']}, trained {turns['trained']} in {summary['updates']} updates",
    ]
    lines += _vote_lines(imported) + _problem_lines(imported)
    if "learning" in summary:
        lines.append(_hints_line(summary["learning"]))
    if turns["dropped"]:
        told = ", ".join(f"{number} {reason}" for reason, number in turns["dropped"].items())
        lines.append(f"dropped: {told}")
    for name, gap in summary["gap"].items():
        if "after" not in gap:
            continue
        before, after = gap["before"], gap["after"]
        lines.append(
            f"gap between hinted teacher and student on {name.replace('_', '-')} turns "
            f"({before['num_tokens']} tokens): "
            f"reverse KL {before['reverse_kl']:.4f} -> {after['reverse_kl']:.4f}, forward KL "
            f"{before['forward_kl']:.4f} -> {after['forward_kl']:.4f} nats per token"
        )
    if summary["updates"] and "held_out" not in summary["gap"]:
        lines.append(
            "no held-out turn was scored, so the gap on turns that were not trained on is "
            "unknown: a new --run folder with --set replay.held_out=SHARE holds out more sessions"
        )
    if summary["note"]:
        lines.append(f"note: {summary['note']}")
    return lines


def _hints_line(learning: dict[str, Any]) -> str:
    hints = Counter(one["not_rehearsed"] or one["status"] for one in learning["hints"])
    told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in hints.items())
    lessons = sum(learning["steps"]["lessons"].values())
    measured = learning["measured"]
    obedience = measured["obedience"] if measured else None
    line = f"hints: {told or 'none'}; {lessons} lessons trained"
    if obedience is not None:
        line += (
            f"; open wishes done {obedience['value']:.2f} of {obedience['count']} answers "
            f"(start {obedience['before']:.2f})"
        )
    stopped = learning["training_stopped"]
    return f"{line}; training was stopped: {stopped}" if stopped else line


def shown(text: str) -> str:
    """Foreign `text` on one line of a terminal: no control characters, and not too long."""
    kept = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in kept)


def handed_over_lines(imported: ImportReport, status: ReplayStatus) -> list[str]:
    """For the terminal, once nothing waits for judge or teacher in the run that got the turns."""
    states = status.states
    waiting = states[TurnState.READY] + states[TurnState.LEASED]
    told = ", ".join(f"{number} {reason.value}" for reason, number in status.drops.items())
    lines = [
        f"handed over {imported.num_rendered} of {imported.num_turns} turns, "
        f"{imported.num_new} new",
        f"of {status.num_recorded} recorded turns in this run {status.num_judged} are judged, "
        f"{status.num_accepted} accepted, {status.num_trained} trained; {waiting} wait for a full "
        "batch",
    ]
    lines += _vote_lines(imported.as_dict()) + _problem_lines(imported.as_dict())
    return [*lines, f"dropped: {told}"] if told else lines


def _vote_lines(imported: dict[str, Any]) -> list[str]:
    given, new = imported["turns_with_votes"], imported["turns_with_new_votes"]
    if given == new:
        return []
    return [
        f"votes on {given} turns, {new} of them new: turns that have a hint keep their votes; "
        "use another run folder to judge again"
    ]


def _problem_lines(imported: dict[str, Any]) -> list[str]:
    if not imported["problems"]:
        return []
    return [
        "problems, by reason with the first of each (all: import_problems.jsonl):",
        *(
            f"  {number} {reason}: {shown(imported['first_problems'][reason])}"
            for reason, number in imported["problems"].items()
        ),
    ]


async def save(folder: Path, summary: dict[str, Any], store: Store, rendering: Rendering) -> Path:
    """Write both files; returns the path of the report."""
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (folder / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
    turns, imported = summary["turns"], summary["import"]
    hints = await store.recorded_hints(HINTS_SHOWN)
    details = [
        ("Turns by state", ("state", "turns"), _rows(turns["states"])),
        ("Turns dropped, by reason", ("reason", "turns"), _rows(turns["dropped"])),
        (
            "Problems of the recording, by reason",
            ("reason", "number", "the first"),
            [
                (reason, str(number), shown(imported["first_problems"][reason]))
                for reason, number in imported["problems"].items()
            ],
        ),
        (
            "Gap between hinted teacher and student, nats per token",
            ("turns", "reverse KL", "forward KL"),
            _gap_rows(summary),
        ),
        *(await learning_tables(store, folder) if "learning" in summary else []),
        *health_tables(metric_rows(folder)),
        ("Seconds", ("stage", "s"), [(k, f"{v:.1f}") for k, v in summary["seconds"].items()]),
    ]
    path = folder / "report.html"
    write_report(
        path,
        title=f"Replay ({summary['mode']}) with {model_name(summary['model'])}",
        story=replay_story(summary, hints),
        facts=[
            ("sessions", str(imported["sessions"])),
            ("turns", str(turns["recorded"])),
            ("judged", str(turns["judged"])),
            ("accepted", str(turns["accepted"])),
            *_learned(summary),
        ],
        tables=[
            *before_and_after(folder, await store.hints(limit=MOST_HINTS), gap_rows(summary)),
            *first_hints(hints),
        ],
        details=[table for table in details if table[2]],
        curves=training_curves(folder) if summary["updates"] else [],
        examples=(
            None
            if summary["mode"] == "judge-only" and not summary["updates"]
            else await example_turns(store, rendering, limit=EXAMPLES)
        ),
    )
    return path


def _learned(summary: dict[str, Any]) -> list[tuple[str, str]]:
    if summary["mode"] == "judge-only" and not summary["updates"]:
        return []
    turns = summary["turns"]
    counts = {name.replace("_", " "): turns[name] for name in ("held_out", "trained")}
    return [(name, str(n)) for name, n in (*counts.items(), ("updates", summary["updates"]))]


def _rows(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, str(number)) for name, number in counts.items()]


def _gap_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (f"{name}, {when}", f"{gap['reverse_kl']:.4f}", f"{gap['forward_kl']:.4f}")
        for name, found in summary["gap"].items()
        for when, gap in found.items()
    ]
