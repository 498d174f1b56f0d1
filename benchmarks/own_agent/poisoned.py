"""Two tenants on one policy: what one tenant's objections change for the other.

The people of tenant B have the cell's wishes and object as many times as the cell says. Those of
tenant A ask for the same things in as many sessions, and wish nothing, or what `--others` names.
Everything is measured with A's key. One policy answers both, so A's people also get what B's people
asked for: the figures show how much of it, what it costs A elsewhere, and how much of each step was
B's, next to `trainer.max_share` (which limits turns while the other tenant has ready ones).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from benchmarks.own_agent.agent import Endpoint
from benchmarks.own_agent.cell import (
    Traffic,
    as_counts,
    say,
    session,
    shown_rates,
    start_rates,
    wait_for_hints,
)
from benchmarks.own_agent.measure import measure
from benchmarks.own_agent.people import Patience
from benchmarks.own_agent.protocol import Cell, Protocol
from benchmarks.own_agent.serving import ROOT, Served, ServeFailed
from benchmarks.own_agent.table import (
    Result,
    before_after,
    fall_of,
    grouped,
    markdown,
    pooled,
    settings_of,
    shown,
    shown_fall,
    worst_untouched,
)
from benchmarks.own_agent.wishes import WISHES
from opd.run import config as run_config
from records.lessons.rows import LessonRow, LessonSampleRow
from records.store import Store
from records.tables.models import SampleRow, TurnRow

A, B = "a", "b"
KEYS_KNOWN_S = 4.0
"""After this time a running endpoint knows a new key (`proxy.key_refresh_s`)."""
HINTED = ("live", "hint")
HEADER = (
    "settings",
    "B wishes",
    "A wishes",
    "seeds",
    "objections of B; of A",
    "B's wish held",
    "A, the same kind: usual value falls by",
    "A's wish held",
    "A, untouched kinds: usual value falls by",
    "most of a step that was B's: all; turns and hint lessons; turns",
    "max_share",
    "steps",
)


async def make_key(folder: Path, tenant: str, *words: str) -> str:
    """A key of a tenant, created like a user does it. Raises ServeFailed."""
    command = [sys.executable, "-m", "opd.cli.app", "keys", "create"]
    command += ["--run", str(folder.resolve()), "--tenant", tenant, *words]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ServeFailed(f"opd keys create: {output.decode()}")
    return output.decode().split()[-1]


def with_key(endpoint: Endpoint, key: str) -> Endpoint:
    """The endpoint, used with a key."""
    return replace(endpoint, client=endpoint.client.with_options(api_key=key))


async def phases(served: Served, cell: Cell, protocol: Protocol, out: Path) -> dict[str, Any]:
    """Like `cell.phases`, with two tenants."""
    keys = [await make_key(served.folder, tenant) for tenant in (A, B)]
    admin = await make_key(served.folder, "admin", "--admin")
    await asyncio.sleep(KEYS_KNOWN_S)
    served = replace(served, key=admin)
    at_a, at_b = (with_key(served.endpoint, key) for key in keys)
    start = await start_rates(at_a, cell, protocol, out)
    wishes = [WISHES[kind] for kind in cell.kinds]
    others = [WISHES[kind] for kind in protocol.others]
    about = [*wishes, *others]
    quiet, of_b = Traffic(patience=Patience(0)), Traffic(patience=Patience(cell.objections))
    of_a = Traffic(patience=Patience(cell.objections))
    for number in range(protocol.quiet_sessions):
        endpoint = (at_a, at_b)[number % 2]
        await session(endpoint, cell, protocol, about, number, quiet)
    while of_b.sessions < protocol.sessions and not (
        of_b.patience.is_over(cell.kinds) and of_a.patience.is_over(protocol.others)
    ):
        number = protocol.quiet_sessions + of_a.sessions + of_b.sessions
        await session(at_b, cell, protocol, wishes, number, of_b)
        await session(at_a, cell, protocol, others, number + 1, of_a, about=about)
    say(f"people: B {of_b.as_numbers()}, A {of_a.as_numbers()}")
    waited = await wait_for_hints(served, wait_s=protocol.wait_s, steady_s=protocol.steady_s)
    say(f"waited {waited['seconds']:.0f} s: {waited['ended']}; hints: {waited['hints']}")
    clock = time.monotonic()
    end = await measure(at_a, [*cell.kinds, *protocol.others], protocol.n, cell.seed)
    say(f"end: {shown_rates(end)}")
    config = run_config.load(served.folder / "config.toml")
    async with await Store.open(config.store) as store:
        steps = await store.read(step_parts)
    return {
        "start": start,
        "end": as_counts(end),
        "measuring_seconds": round(time.monotonic() - clock, 1),
        "quiet": quiet.as_numbers(),
        "objecting": of_b.as_numbers(),
        "of_a": of_a.as_numbers(),
        "looks": [],
        "waited": waited,
        "hints": await served.hints(),
        "max_share": config.trainer.max_share,
        "steps": steps,
    }


def step_parts(connection: Connection) -> list[dict[str, Any]]:
    """For each trained step: its version, and samples by scope and kind (`live`, or a lesson's)."""
    found: dict[int, list[tuple[str, str, int]]] = {}
    turns = (
        select(SampleRow.version, TurnRow.scope, func.count())
        .join(TurnRow, TurnRow.turn_id == SampleRow.turn_id)
        .group_by(SampleRow.version, TurnRow.scope)
    )
    for version, scope, number in connection.execute(turns):
        found.setdefault(version, []).append((scope, "live", number))
    lessons = (
        select(LessonSampleRow.version, LessonRow.scope, LessonRow.kind, func.count())
        .join(LessonRow, LessonRow.lesson_id == LessonSampleRow.lesson_id)
        .group_by(LessonSampleRow.version, LessonRow.scope, LessonRow.kind)
    )
    for version, scope, kind, number in connection.execute(lessons):
        found.setdefault(version, []).append((scope, kind.value, number))
    return [
        {"version": version, "parts": [list(part) for part in sorted(found[version])]}
        for version in sorted(found)
    ]


def most_of(
    steps: Iterable[Mapping[str, Any]], tenant: str, kinds: Sequence[str] | None = None
) -> float | None:
    """The largest share of a step that was this tenant's, among its samples of `kinds` (None: all).
    None if no step has any.
    """
    shares = []
    for step in steps:
        parts = [part for part in step["parts"] if kinds is None or part[1] in kinds]
        total = sum(number for _, _, number in parts)
        if total:
            mine = sum(number for scope, _, number in parts if scope == f"tenant:{tenant}")
            shares.append(mine / total)
    return max(shares, default=None)


def poisoned_table(results: Iterable[Result]) -> str:
    """A row for runs of two tenants that differ only in their seed; "" without any."""
    rows = [_row(group) for group in grouped(one for one in results if "of_a" in one)]
    return markdown(HEADER, rows) if rows else ""


def _row(group: Sequence[Result]) -> Sequence[str]:
    first = group[0]
    others = first["protocol"]["others"]
    same = [f"usual_{kind}" for kind in first["kinds"]]
    held = before_after(group, "wanted")
    theirs = [pooled(group, when, [f"wanted_{k}" for k in others]) for when in ("start", "end")]
    usual = before_after(group, "usual")
    steps = [step for one in group for step in one["steps"]]
    shares = (most_of(steps, B), most_of(steps, B, HINTED), most_of(steps, B, ("live",)))
    made = (sum(o[key]["objections"].values()) for o in group for key in ("objecting", "of_a"))
    return (
        settings_of(first),
        " and ".join(first["kinds"]),
        " and ".join(others) or "nothing",
        ", ".join(str(one["seed"]) for one in group),
        "; ".join(map(str, made)),
        f"{shown(held[0])} → {shown(held[1])}",
        shown_fall(fall_of(pooled(group, "start", same), pooled(group, "end", same))),
        f"{shown(theirs[0])} → {shown(theirs[1])}" if others else "-",
        f"{shown_fall(fall_of(*usual))}; worst {worst_untouched(group)}",
        "; ".join("-" if share is None else f"{share:.2f}" for share in shares),
        ", ".join(str(one["max_share"]) for one in group),
        ", ".join(str(len(one["steps"])) for one in group),
    )
