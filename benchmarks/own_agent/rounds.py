"""What became of wishes round by round, if people came more than once. Numbers in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.own_agent.table import (
    Result,
    fall_of,
    grouped,
    markdown,
    pooled,
    settings_of,
    shown,
    shown_fall,
)
from benchmarks.own_agent.wishes import WISHES

HEADER = (
    "settings",
    "seeds",
    "round",
    "sessions",
    "objections",
    "wishes held",
    "by kind",
    "open opposite",
    "untouched, usual value: falls by",
    "versions",
    "hints",
    "rows of the memory",
)


def rounds_table(results: Iterable[Result]) -> str:
    """A row for each round of people who came more than once; "" if none did."""
    rows = [
        _row(group, number)
        for group in grouped(results)
        for number in range(min(len(one.get("rounds", ())) for one in group))
        if len(group[0]["rounds"]) > 1
    ]
    return markdown(HEADER, rows) if rows else ""


def _row(group: Sequence[Result], number: int) -> Sequence[str]:
    rounds: list[Mapping[str, Any]] = [one["rounds"][number] for one in group]
    first = group[0]
    turned = rounds[0]["turned"]
    held = {k: f"usual_{k}" if k in turned else f"wanted_{k}" for k in first["kinds"]}
    openly = [f"contrary_{'turned_' if kind in turned else ''}{kind}" for kind in first["kinds"]]
    usual = [f"usual_{kind}" for kind in WISHES if kind not in first["kinds"]]
    by_kind = [
        f"{kind}{' (turned)' if kind in turned else ''} {shown(pooled(rounds, 'end', [name]))}"
        for kind, name in held.items()
    ]
    return (
        settings_of(first),
        ", ".join(str(one["seed"]) for one in group),
        str(number + 1),
        ", ".join(str(one["sessions"]) for one in rounds),
        ", ".join(str(sum(one["objections"].values())) for one in rounds),
        shown(pooled(rounds, "end", held.values())),
        "; ".join(by_kind),
        f"{shown(pooled(group, 'start', openly))} → {shown(pooled(rounds, 'end', openly))}",
        shown_fall(fall_of(pooled(group, "start", usual), pooled(rounds, "end", usual))),
        ", ".join(str(one["store"]["version"]) for one in rounds),
        _counts(one["waited"]["hints"] for one in rounds),
        _counts(one["store"]["hint_rows"] for one in rounds),
    )


def _counts(parts: Iterable[Mapping[str, int]]) -> str:
    total: Counter[str] = Counter()
    for one in parts:
        total.update(one)
    return ", ".join(f"{n} {name}" for name, n in total.most_common()) or "none"
