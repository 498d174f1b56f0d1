"""What a replay did, for somebody who has not seen it: sentences, and the gap before and after.

It reads the summary of a replay (`opd.replay.summary`), and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opd.report.page import Table
from opd.report.story import Row, counted, line, model_name, short
from records.reading.replay_status import RecordedHint

_GROUPS = {
    "held_out": "turns of sessions that never train",
    "trained": "turns that were trained on",
}


def replay_story(summary: dict[str, Any], hints: Sequence[RecordedHint]) -> list[str]:
    """Who the users were, what was wished, what was trained, and whether it helped."""
    imported, turns = summary["import"], summary["turns"]
    return [
        f"{counted(imported['sessions'], 'recorded session')} with "
        f"{counted(imported['turns'], 'answer')} were read: what users, tools and agents said. "
        f"{imported['turns_rendered']} of the answers could be written as tokens of "
        f"{model_name(summary['model'])}. Nobody answered anything anew.",
        *_resampled(turns),
        f"The judge read what followed {counted(turns['judged'], 'answer')}. After "
        f"{turns['accepted']} of them it found an objection (what the answer should have been), "
        "and wrote it down as a hint.",
        *(
            f"For example, on message {one.position} of session {short(one.session_name)}: "
            f"“{short(one.hint)}”"
            for one in hints[:1]
        ),
        *_trained(summary),
        *_gained(summary),
    ]


def _resampled(turns: dict[str, Any]) -> Iterator[str]:
    if turns["resampled"]:
        yield (
            f"The policy answered {counted(turns['resampled'], 'recorded request')} again; these "
            "answers train in place of the recorded ones."
        )


def _trained(summary: dict[str, Any]) -> Iterator[str]:
    turns = summary["turns"]
    if summary["mode"] == "judge-only" and not summary["updates"]:
        yield "Nothing was trained: this replay only judges."
        return
    yield (
        f"{counted(summary['updates'], 'update')} trained {turns['trained']} of them. "
        f"{turns['held_out']} were held out: they show whether what was learned holds for sessions "
        "that were not trained on."
    )


def _gained(summary: dict[str, Any]) -> Iterator[str]:
    """What the table says of the first group that was measured twice."""
    for _, before, after, said in gap_rows(summary)[:1]:
        yield (
            "The gap is how far the policy is from the teacher, which reads the hint; 0 means that "
            f"nothing is left to learn. It was {before} and is {after} nats a token: {said}."
        )


def gap_rows(summary: dict[str, Any]) -> list[Row]:
    """The gap (reverse KL) on each group of turns that was measured with both weights."""
    rows = []
    for name, what in _GROUPS.items():
        found = summary["gap"].get(name, {})
        if "after" in found:
            rows.append(_row(f"gap to the hinted teacher, {what}", found, summary, name))
    return rows


def _row(title: str, found: dict[str, Any], summary: dict[str, Any], name: str) -> Row:
    before, after, change = found["before"], found["after"], summary["gap_change"][name]
    if change["low"] is None:
        plain = [f"{one['reverse_kl']:.3f}" for one in (before, after)]
        return title, plain[0], plain[1], "not known: too few sessions for an interval"
    return line(
        title,
        *((one["reverse_kl"], one["low"], one["high"]) for one in (before, after)),
        more_is_better=False,
        change=(change["value"], change["low"], change["high"]),
    )


def first_hints(hints: Sequence[RecordedHint]) -> list[Table]:
    """The first hints; no table without any."""
    rows = [(one.session_name, str(one.position), one.hint) for one in hints]
    header = ("session", "message", "hint")
    return [(f"The first {counted(len(rows), 'hint')}", header, rows)] if rows else []
