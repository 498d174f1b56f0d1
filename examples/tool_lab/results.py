"""The lab's results: `summary.json`, the table in the terminal, and `report.html`.

Numbers in, files out; nothing is measured here.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from api_proxy.pages.measured import Curve
from examples.tool_lab.evaluate import OTHER_SKILLS, Rate, worst_success
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState
from examples.tool_lab.measure import Answered, as_numbers
from examples.tool_lab.preferences import PREFERENCES
from opd.rehearsal.reported import learning_tables
from opd.report.curves import metric_rows, training_curves
from opd.report.health import health_tables
from opd.report.page import write_report
from opd.report.run_report import EXAMPLES, example_turns
from opd.report.run_summary import run_summary
from opd.report.story import line, of_rate, story
from opd.run.config import RunConfig
from records.names import TurnState
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering

OBJECTIONS = ("declined", "corrected")
"""Reactions with which a user objects to a violated preference."""
_SKILLS = {
    "valid_calls": "tool calls are valid",
    "copied_entities": "names and numbers of the request are in the call",
    "facts_in_answers": "the tool's facts are in the answer",
    "other_preferences": "what nobody objects to stays as it was",
}


async def build_summary(
    config: RunConfig,
    lab: LabConfig,
    store: Store,
    state: LearningState,
    before: dict[str, Rate],
    after: dict[str, Rate],
    gap: dict[str, dict[str, float]],
    timings: dict[str, float],
) -> dict[str, Any]:
    """Everything that the run measured, ready for JSON. A mean of nothing is null."""
    counts = await store.counts()
    drops = await store.drops()
    votes = await store.vote_summary()
    latest = await store.latest_version()
    kept = [_ratio(before[name], after[name]) for name in OTHER_SKILLS]
    known = [value for value in kept if value is not None]
    return {
        "success_before": worst_success(before),
        "success_after": worst_success(after),
        "success_by_preference": {
            kind: {
                "before": before[f"success_{kind}"].value,
                "after": after[f"success_{kind}"].value,
            }
            for kind in lab.preferences
        },
        "other_skills_before": as_numbers({name: before[name] for name in OTHER_SKILLS}),
        "other_skills_after": as_numbers({name: after[name] for name in OTHER_SKILLS}),
        "other_skills_kept_worst": min(known) if known else None,
        "contrary_before": as_numbers(_contrary(before)),
        "contrary_after": as_numbers(_contrary(after)),
        "gap_to_hinted_teacher": gap | {"fall": gap_falls(gap)},
        "eval_samples": lab.eval_samples,
        "updates": latest.version if latest is not None else 0,
        "update_attempts": state.attempts,
        "training_stopped": state.stopped,
        "reached_updates": state.attempts >= lab.updates,
        "turns": sum(counts.values()),
        "turns_by_state": {key.value: number for key, number in counts.items()},
        "votes": votes.votes_pos + votes.votes_neg + votes.votes_none,
        "votes_positive": votes.votes_pos,
        "votes_negative": votes.votes_neg,
        "votes_none": votes.votes_none,
        "accepted": votes.accepted,
        "accept_rate": votes.accept_rate,
        "judged_share": await store.judged_share(),
        "judge_prompt_tokens": votes.prompt_tokens,
        "judge_completion_tokens": votes.completion_tokens,
        "samples": counts.get(TurnState.TRAINED, 0),
        "dropped": {key.value: number for key, number in drops.items()},
        "sessions": dict(state.sessions),
        "session_errors": state.errors[:20],
        "seconds": round(timings["everything"], 2),
        "seconds_by_phase": {name: round(value, 2) for name, value in timings.items()},
        "policy_version": latest.version if latest is not None else 0,
        "hints": lab.hints,
        "objections_by_update": objections_by_update(state),
        "seed": lab.seed,
        "objective": config.trainer.objective.model_dump(),
        "learning_rate": config.trainer.learning_rate,
    }


async def save_results(
    folder: Path,
    summary: dict[str, Any],
    store: Store,
    rendering: Rendering,
    before: dict[str, Rate],
    after: dict[str, Rate],
    said: Sequence[tuple[Answered, Answered]],
) -> None:
    """Write summary.json and report.html into the run folder; `said` are answers to the same
    questions before and after.
    """
    rows = metric_rows(folder)
    summary["metrics_mean"] = _metric_means(rows)
    summary["learning"] = await run_summary(folder, store, rows)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    write_report(
        folder / "report.html",
        title=f"Tool lab, seed {summary['seed']}, hints: {summary['hints']}",
        story=[_users(summary), *await story(folder, store, rows)],
        facts=_facts(summary),
        tables=[
            (
                "Before and after, on names never seen in training, with 95% intervals",
                ("measured", "before", "after", "verdict"),
                [*_verdict_rows(before, after), *_gap_rows(summary["gap_to_hinted_teacher"])],
            ),
            (
                "Answers before and after",
                ("question", "before", "after"),
                [(one.asked, one.answer, other.answer) for one, other in said],
            ),
        ],
        details=[
            *await learning_tables(store, folder),
            (
                "Turns dropped, by reason",
                ("reason", "turns"),
                [(name, str(number)) for name, number in summary["dropped"].items()],
            ),
            *health_tables(rows),
            (
                "Where the time went",
                ("phase", "seconds"),
                [(name, f"{value:.1f}") for name, value in summary["seconds_by_phase"].items()],
            ),
        ],
        curves=[_objections_curve(summary), *training_curves(folder)],
        examples=await example_turns(store, rendering, limit=EXAMPLES),
    )


def print_results(
    console: Console,
    summary: dict[str, Any],
    before: dict[str, Rate],
    after: dict[str, Rate],
    folder: Path,
) -> None:
    """The final table."""
    table = Table(title="before and after, temperature 1, names never seen in training")
    for heading in ("skill", "before", "after"):
        table.add_column(heading, justify="left" if heading == "skill" else "right")
    for row in _rate_rows(before, after):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{summary['updates']} updates on {summary['samples']} turns and {_num_lessons(summary)} "
        f"lessons; {summary['turns']} turns, "
        f"{summary['votes']} votes, {summary['accepted']} hints; "
        f"dropped: {summary['dropped']}; {summary['seconds']:.0f} s"
    )
    falls = summary["gap_to_hinted_teacher"]["fall"]
    console.print(
        f"objective {summary['objective']['name']}; gap to the hinted teacher closed by "
        + ", ".join(f"{share:.0%} ({name})" for name, share in falls.items())
    )
    if summary["training_stopped"] is not None:
        console.print(f"[yellow]training was stopped: {summary['training_stopped']}[/]")
    elif not summary["reached_updates"]:
        console.print("[yellow]learning ended at its time limit, before all updates were done[/]")
    console.print(f"report: [bold]{folder / 'report.html'}[/]")


def _num_lessons(summary: dict[str, Any]) -> int:
    return sum(summary["learning"]["steps"]["lessons"].values())


def gap_falls(gap: dict[str, dict[str, float]]) -> dict[str, float]:
    """The share by which each gap fell; negative if it rose."""
    return {
        name: round(1.0 - gap["after"][name] / before, 4)
        for name, before in gap["before"].items()
        if before > 0
    }


def objections_by_update(state: LearningState) -> list[tuple[int, float]]:
    """Share of turns to which a user objected, between one update attempt and the next.

    Updates without a turn in between have no share and are left out.
    """
    shares = []
    for (_, before), (update, after) in itertools.pairwise(state.seen_at_update):
        new = after - before
        if new.total() > 0:
            objections = sum(new[kind] for kind in OBJECTIONS)
            shares.append((update, round(objections / new.total(), 4)))
    return shares


def _objections_curve(summary: dict[str, Any]) -> Curve:
    points = summary["objections_by_update"]
    return Curve(
        title="Is it learning? Turns to which a user objected",
        unit="share of turns",
        steps=[update for update, _ in points],
        series={"live conversations": [share for _, share in points]},
        says="Of the turns between one step and the next. Healthy: it falls while wishes are "
        "learned.",
    )


def _ratio(before: Rate, after: Rate) -> float | None:
    return after.value / before.value if before.value > 0 else None


def _contrary(rates: dict[str, Rate]) -> dict[str, Rate]:
    return {name: rate for name, rate in rates.items() if name.startswith("contrary")}


def _rate_rows(before: dict[str, Rate], after: dict[str, Rate]) -> list[tuple[str, str, str]]:
    return [(name, _shown(before[name]), _shown(after[name])) for name in before]


def _users(summary: dict[str, Any]) -> str:
    wishes = [PREFERENCES[kind] for kind in summary["success_by_preference"]]
    said = " ".join(f"“{one.hints[one.alternative][0]}”" for one in wishes)
    return (
        "A travel agent with four tools answers scripted users. They never ask for what they want, "
        f"and object to an answer that is otherwise: {said} Some users openly ask for the "
        "opposite, and are to get it."
    )


def _verdict_rows(
    before: dict[str, Rate], after: dict[str, Rate]
) -> list[tuple[str, str, str, str]]:
    """More is better for every rate of the lab."""
    return [
        line(_in_words(name), of_rate(before[name]), of_rate(after[name]), more_is_better=True)
        for name in before
    ]


def _in_words(name: str) -> str:
    """What a rate is the share of."""
    group, _, kind = name.partition("_")
    if kind not in PREFERENCES:
        return _SKILLS[name]
    wish = PREFERENCES[kind]
    said = f"“{wish.hints[wish.alternative][0]}”"
    return f"unasked: {said}" if group == "success" else f"openly asked for the opposite of {said}"


def _gap_rows(gap: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """In nats per token; measured once, so without an interval."""
    rows: list[tuple[str, str, str, str]] = []
    for name, value in gap["before"].items():
        fall = gap["fall"].get(name)
        said = "none to close" if fall is None else f"closed by {fall:.0%}"
        rows.append(
            (
                f"gap to the hinted teacher, nats per token ({name.replace('_', ' ')})",
                f"{value:.3f}",
                f"{gap['after'][name]:.3f}",
                said,
            )
        )
    return rows


def _shown(rate: Rate) -> str:
    low, high = rate.interval
    return f"{rate.value:.3f} [{low:.3f}, {high:.3f}]"


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("success before", f"{summary['success_before']:.3f}"),
        ("success after", f"{summary['success_after']:.3f}"),
        ("updates", str(summary["updates"])),
        ("turns", str(summary["turns"])),
        ("votes", str(summary["votes"])),
        ("hints accepted", str(summary["accepted"])),
        ("seconds", f"{summary['seconds']:.0f}"),
    ]


def _metric_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each numeric metric over the update attempts of the run."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    return {
        name: statistics.fmean(row[name] for row in rows if isinstance(row.get(name), float))
        for name in sorted(names)
    }
