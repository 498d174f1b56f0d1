"""From a run's folder and store to what a report shows: curves and example turns.

It draws nothing itself (opd/report/page.py does). `opd.report.run_summary` gives the same in
numbers.
"""

from __future__ import annotations

from pathlib import Path

from api_proxy.pages.tokens import signals_of, token_texts
from judge.votes.prompts import message_text
from opd.rehearsal.reported import learning_tables
from opd.rehearsal.saying import MOST_HINTS
from opd.report.curves import metric_rows, training_curves
from opd.report.health import health_tables
from opd.report.page import ReportExample, write_report
from opd.report.run_summary import write_run_summary
from opd.report.story import before_and_after, story
from records.reading.drop_words import DROP_WORDS
from records.store import Store
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.stop_order import why_stopped

EXAMPLES = 8
"""Turns that the page shows, each of another version."""


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
        story=await story(folder, store, rows),
        facts=[
            ("policy version", str(latest.version if latest is not None else 0)),
            ("updates", str(len(trained))),
            ("turns", str(sum(counts.values()))),
            ("turns judged", "all in time" if share is None else f"{share:.0%}"),
            *_end(folder),
        ],
        tables=before_and_after(folder, await store.hints(limit=MOST_HINTS)),
        details=[
            *await learning_tables(store, folder),
            ("Turns by state", ("state", "turns"), [(k.value, str(n)) for k, n in counts.items()]),
            (
                "Turns dropped, by reason",
                ("reason", "turns", "why"),
                [(k.value, str(n), DROP_WORDS[k]) for k, n in drops.items()],
            ),
            *health_tables(trained),
        ],
        curves=training_curves(folder),
        examples=await example_turns(store, rendering, limit=EXAMPLES),
    )
    return path


def _end(folder: Path) -> list[tuple[str, str]]:
    """Why training has stopped, if it has."""
    why = why_stopped(folder)
    return [] if why is None else [("training has stopped", why)]


async def example_turns(store: Store, rendering: Rendering, limit: int) -> list[ReportExample]:
    """The newest trained turn of each of the `limit` newest versions that trained one, with its
    tokens and what is known about them.
    """
    found = await store.example_turns(limit, one_per_version=True)
    return [
        ReportExample(
            title=f"Version {example.sample.version} trained on turn {example.turn.turn_id}",
            prompt="\n".join(message_text(message) for message in example.turn.messages),
            next_state="\n".join(message_text(message) for message in example.turn.next_state),
            hint=example.score.hint or "(none: the teacher saw the original prompt)",
            ids=example.turn.response_ids.tolist(),
            tokens=token_texts(example.turn.response_ids, rendering.decode),
            signals=signals_of(example.turn, example.score, example.sample, example.sample.version),
        )
        for example in found
    ]
