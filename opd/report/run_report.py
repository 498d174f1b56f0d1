"""From a run's folder and store to what a report shows: curves and example turns.

Reads `metrics.jsonl` and trained turns; draws nothing itself (opd/report/page.py does). The same in
numbers is `opd.report.run_summary`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from judge.votes.prompts import message_text
from opd.rehearsal.reported import learning_curves, learning_tables
from opd.report.page import Curve, ReportExample, metric_curve, write_report
from opd.report.run_summary import write_run_summary
from records.reading.drop_words import DROP_WORDS
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from trainer.step.stop_order import why_stopped

EXAMPLES = 3
"""Turns that the page shows."""


async def write_run_report(folder: Path, title: str, store: Store, rendering: Rendering) -> Path:
    """Draw the run as it is now into its folder's report.html, and write its summary.json; returns
    the report's path.
    """
    rows = metric_rows(folder)
    await write_run_summary(folder, store, rows)
    counts, drops = await store.counts(), await store.drops()
    latest, share = await store.latest_version(), await store.judged_share()
    trained = [row for row in rows if row.get("skipped") is None]
    path = folder / "report.html"
    write_report(
        path,
        title=title,
        facts=[
            ("policy version", str(latest.version if latest is not None else 0)),
            ("updates", str(len(trained))),
            ("turns", str(sum(counts.values()))),
            ("turns judged", "all in time" if share is None else f"{share:.0%}"),
            *_end(folder),
        ],
        tables=[
            ("Turns by state", ("state", "turns"), [(k.value, str(n)) for k, n in counts.items()]),
            (
                "Turns dropped, by reason",
                ("reason", "turns", "why"),
                [(k.value, str(n), DROP_WORDS[k]) for k, n in drops.items()],
            ),
            *await learning_tables(store, folder),
        ],
        curves=learning_curves(folder) + run_curves(rows),
        examples=await example_turns(store, rendering, limit=EXAMPLES),
    )
    return path


def _end(folder: Path) -> list[tuple[str, str]]:
    """Why training has stopped, where it has."""
    why = why_stopped(folder)
    return [] if why is None else [("training has stopped", why)]


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, oldest first; none if nothing was trained yet.

    A last line that a killed process left unfinished is not a row.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_curves(rows: list[dict[str, Any]]) -> list[Curve]:
    """The plots that tell at a glance whether a run learns and stays healthy."""
    trained = [row for row in rows if row.get("skipped") is None]
    plots: list[tuple[str, str, dict[str, str]]] = [
        ("Teacher minus student", "nats", {"opd/adv_mean": "mean", "opd/adv_std": "std"}),
        ("|teacher - student|", "nats", {"teacher_student_absdiff": "mean"}),
        ("Loss", "", {"loss": "total", "pg_loss": "policy gradient", "kl_loss": "KL to start"}),
        ("KL to the frozen start", "nats", {"kl_loss": "KL"}),
        ("Staleness", "versions", {"staleness_mean": "mean", "staleness_max": "max"}),
        (
            "Engine against trainer",
            "nats",
            {"train_rollout_logprob_abs_diff": "mean |difference|"},
        ),
        ("Gradient norm", "", {"grad_norm": "before clipping"}),
        ("Entropy", "nats", {"entropy_loss": "mean"}),
        (
            "Seconds of a step",
            "s",
            {
                "seconds/step": "all",
                "seconds/checkpoint": "checkpoint",
                "seconds/publish": "publish",
            },
        ),
    ]
    curves = [metric_curve(title, unit, trained, names) for title, unit, names in plots]
    return curves + correction_curves(trained)


def correction_curves(rows: list[dict[str, Any]]) -> list[Curve]:
    """The six diagnostic plots of rollout correction, with the bounds of its health warnings."""
    plots: list[tuple[str, str, dict[str, str], dict[str, float]]] = [
        (
            "Mean importance weight",
            "",
            {"rollout_is_mean": "applied", "rollout_is_mean_raw": "before the cap"},
            {"ideal": 1.0},
        ),
        (
            "Effective sample size of the weights",
            "share",
            {
                "rollout_is_eff_sample_size": "applied",
                "rollout_is_eff_sample_size_raw": "before the cap",
            },
            {"good above": 0.5, "too few below": 0.3},
        ),
        (
            "Turns vetoed",
            "share",
            {"rollout_is_veto_fraction": "vetoed"},
            {"too many above": 0.1},
        ),
        (
            "KL of engine and trainer",
            "nats",
            {"kl": "KL", "k3_kl": "K3"},
            {"ideal": 0.0},
        ),
        ("Perplexity, trainer over engine", "", {"ppl_ratio": "ratio"}, {"ideal": 1.0}),
        (
            "Chi-squared of engine and trainer",
            "",
            {"chi2_token": "tokens", "chi2_seq": "turns"},
            {"too far above": 1.0},
        ),
    ]
    return [
        metric_curve(
            title,
            unit,
            rows,
            {f"rollout_corr/{name}": label for name, label in names.items()},
            marks,
        )
        for title, unit, names, marks in plots
    ]


async def example_turns(store: Store, rendering: Rendering, limit: int) -> list[ReportExample]:
    """The `limit` newest trained turns with their tokens and advantages."""
    return [
        ReportExample(
            title=f"Turn {example.turn.turn_id}, trained in version {example.version}",
            prompt="\n".join(message_text(message) for message in example.turn.messages),
            next_state="\n".join(message_text(message) for message in example.turn.next_state),
            hint=example.score.hint or "(none: the teacher saw the original prompt)",
            tokens=[rendering.decode([int(token)]) for token in example.turn.response_ids],
            advantages=[float(value) for value in example.sample.advantages],
        )
        for example in await store.example_turns(limit)
    ]
