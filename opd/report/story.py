"""What happened in a run, for somebody who has not seen it: sentences, and what was measured before
and after. It reads what others measured, and measures nothing.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.report.page import Table
from opd.run.resuming import CONFIG_FILE
from records.hints.types import Hint
from records.names import TurnState
from records.store import Store
from rollout_bridge.guard.checks import read_checks
from rollout_bridge.rehearsal.estimates import Rate
from rollout_bridge.rehearsal.journal import GapRow, VersionRow, read_rows
from rollout_bridge.stop_order import why_stopped

_HINTS = 8
_CHARS = 120

Measured = tuple[float, float, float]
"""A value and its 95% interval."""
Row = tuple[str, str, str, str]
"""What was measured, before, after, and the verdict."""


async def story(folder: Path, store: Store, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ran, what users wished, what was trained; `steps` are the rows of metrics.jsonl."""
    counts, latest = await store.counts(), await store.latest_version()
    judged, accepted = await store.num_judged()
    hints = await store.hints(limit=1)
    words = await store.newest_words([one.hint_id for one in hints])
    kept = sum((await store.hint_counts()).values())
    trained = [row for row in steps if row.get("skipped") is None]
    sessions = counted(await store.num_sessions(), "session")
    return [
        f"{counted(sum(counts.values()), 'request')} in {sessions} of users were answered by "
        f"{_model(folder)}{_when(trained)}.",
        f"The judge read what followed {counted(judged, 'answer')}. After {accepted} of them it "
        "found an objection (what the answer should have been), and wrote it down as a hint"
        + (f"; the memory keeps {counted(kept, 'different hint')}." if kept else "."),
        *(_newest(one, words.get(one.hint_id)) for one in hints),
        f"{counted(len(trained), 'step')} trained {counts[TurnState.TRAINED]} of these turns, and "
        f"lessons of the hints. The newest version is {0 if latest is None else latest.version}."
        if trained
        else "No step has trained yet.",
        *_stopped(folder),
    ]


def counted(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _newest(hint: Hint, words: str | None) -> str:
    said = "" if words is None else f" It came from these words after an answer: “{short(words)}”"
    return f"The newest hint is “{short(hint.text)}”.{said}"


def _stopped(folder: Path) -> Iterator[str]:
    if (why := why_stopped(folder)) is not None:
        yield f"Training has stopped: {why}"


def _model(folder: Path) -> str:
    path = folder / CONFIG_FILE
    if not path.is_file():
        return "the policy"
    return model_name(str(tomllib.loads(path.read_text(encoding="utf-8"))["model"]))


def model_name(model: str) -> str:
    """A hub id, or the last two parts of a folder's path."""
    return "/".join(Path(model).parts[-2:])


def _when(trained: Sequence[Mapping[str, Any]]) -> str:
    times = [row["time"] for row in trained if "time" in row]
    if not times:
        return ""
    first, last = (
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(one)) for one in (times[0], times[-1])
    )
    return f"; the first step ended at {first}, the last at {last} (UTC)"


def before_and_after(folder: Path, hints: Sequence[Hint], first: Sequence[Row] = ()) -> list[Table]:
    """The first and the last measurement of each thing that was measured twice, with a verdict,
    below the rows `first`; no table without any.
    """
    rows, checks = read_rows(folder), read_checks(folder)
    texts = {one.hint_id: one.text for one in hints}
    lines = [*first, *_objections(rows), *_gaps(rows, texts), *_obedience(rows)]
    if len(checks) > 1 and checks[0].asked and checks[-1].asked:
        rates = [Rate(hits=one.passed, count=one.asked) for one in (checks[0], checks[-1])]
        lines.append(
            line("right answers to canaries", *(of_rate(one) for one in rates), more_is_better=True)
        )
    header = ("measured", "before", "after", "verdict")
    return [("Before and after, with 95% intervals", header, lines)] if lines else []


def line(
    name: str,
    before: Measured | None,
    after: Measured | None,
    *,
    more_is_better: bool,
    change: Measured | None = None,
) -> Row:
    """A row of the table. `change`: by how much it rose, if both were measured on the same things:
    it decides, since how they differ from each other does not widen its interval.
    """
    if change is None:
        return name, _shown(before), _shown(after), verdict(before, after, more_is_better)
    said = verdict((0.0, 0.0, 0.0), change, more_is_better)
    value, low, high = change
    by = f"{said} (change {value:+.4f} [{low:+.4f}, {high:+.4f}])"
    return name, _shown(before), _shown(after), by


def verdict(before: Measured | None, after: Measured | None, more_is_better: bool) -> str:
    """Better or worse only if the intervals do not touch."""
    if before is None or after is None:
        return "not measured"
    if after[1] > before[2]:
        return "better" if more_is_better else "worse"
    if after[2] < before[1]:
        return "worse" if more_is_better else "better"
    return "no clear difference"


def of_rate(rate: Rate) -> Measured:
    """A rate with its interval."""
    return (rate.value, *rate.interval)


def _objections(rows: Sequence[VersionRow]) -> Iterator[Row]:
    """Per turn: up to the first measured version, and since the one before the last."""
    if len(rows) < 2:
        return
    first, earlier, last = rows[0], rows[-2], rows[-1]
    parts = (
        (first.objections, first.turns),
        (last.objections - earlier.objections, last.turns - earlier.turns),
    )
    if all(0 <= hits <= count and count > 0 for hits, count in parts):
        rates = [of_rate(Rate(hits=hits, count=count)) for hits, count in parts]
        yield line("share of turns that users object to", *rates, more_is_better=False)


def _gaps(rows: Sequence[VersionRow], texts: Mapping[str, str]) -> Iterator[Row]:
    """Of the hints that were measured last, in nats per token."""
    found: dict[str, list[GapRow]] = {}
    for row in rows:
        for one in row.hints:
            if one.gap is not None:
                found.setdefault(one.hint_id, []).append(one.gap)
    latest = [one.hint_id for row in reversed(rows) for one in row.hints]
    for hint_id in [one for one in dict.fromkeys(latest) if len(found.get(one, ())) > 1][:_HINTS]:
        gaps = [(one.value, one.low, one.high) for one in (found[hint_id][0], found[hint_id][-1])]
        name = f"gap to the teacher that reads “{short(texts.get(hint_id, hint_id))}”"
        yield line(name, *gaps, more_is_better=False)


def _obedience(rows: Sequence[VersionRow]) -> Iterator[Row]:
    """The start's rate has no interval of its own; the floor decides."""
    pooled = rows[-1].pooled if rows else None
    if pooled is not None:
        said = "kept" if pooled.passed else f"below the floor, {pooled.floor:.2f}"
        after = (pooled.value, pooled.low, pooled.high)
        yield (
            "open wishes for the opposite that are done",
            f"{pooled.before:.3f}",
            _shown(after),
            said,
        )


def _shown(measured: Measured | None) -> str:
    if measured is None:
        return "not measured"
    value, low, high = measured
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def short(text: str) -> str:
    """On one line, at most 120 characters."""
    words = " ".join(text.split())
    return words if len(words) <= _CHARS else f"{words[: _CHARS - 3]}..."
