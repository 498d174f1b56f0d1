"""One cell of the benchmark: a run of `opd serve`, a few people, and what became of their wishes.

    measure -> people who silently leave -> people who object -> wait -> measure

The wait is for the hints: until all rest, or training was stopped, or nothing changes any more, or
time is up. With several rounds the last three parts are repeated, with people whose patience is
fresh.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.own_agent.agent import Endpoint, run_session
from benchmarks.own_agent.judging import NAME, judging
from benchmarks.own_agent.measure import Rates, measure, measure_wishes
from benchmarks.own_agent.people import Patience, Person, errands_for, wishes_of_one
from benchmarks.own_agent.protocol import Cell, Protocol, wishes_in
from benchmarks.own_agent.scripted import ScriptedJudge
from benchmarks.own_agent.serving import Served, log_of, serving, what_became
from benchmarks.own_agent.travel import Travel
from benchmarks.own_agent.wishes import WISHES, Wish
from rollout_bridge.stop_order import goes_back, why_stopped

Phases = Callable[[Served, Cell, Protocol, Path], Awaitable[dict[str, Any]]]

HOLDS = 0.80
POLL_S = 3.0
SETTLED_S = 10.0
"""How long no hint must be practised before they count as done: one may be blocked for a while."""
AT_WORK = frozenset({"judging", "scoring", "leased"})
"""States of turns that are with, or wait for, judge, teacher or trainer; ready ones wait for others
to fill a batch.
"""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What people did: sessions, replies that they got, seconds, and how often they objected."""

    patience: Patience
    sessions: int = 0
    replies: int = 0
    seconds: float = 0.0

    def as_numbers(self) -> dict[str, Any]:
        """For the file."""
        return {
            "sessions": self.sessions,
            "replies": self.replies,
            "seconds": round(self.seconds, 1),
            "objections": dict(self.patience.said),
        }


async def measured_cell(
    cell: Cell, protocol: Protocol, out: Path, run: Phases | None = None
) -> dict[str, Any]:
    """The cell's results, from its file if it exists, else measured and written there; `run`
    replaces `phases`.
    """
    path = out / f"{cell.name(protocol)}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    folder = free_folder(out / "runs" / cell.name(protocol))
    started = time.monotonic()
    async with (
        judge_of(cell, protocol) as judge_words,
        serving(folder, protocol.settings, judge_words) as served,
    ):
        result = await (run or phases)(served, cell, protocol, out)
    result |= {
        "kinds": list(cell.kinds),
        "seed": cell.seed,
        "asked_objections": cell.objections,
        "protocol": asdict(protocol),
        "digest": protocol.digest,
        "run": folder.name,
        "store": await what_became(folder),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_whole(path, result)
    return json.loads(path.read_text(encoding="utf-8"))


def free_folder(folder: Path) -> Path:
    """`folder`, or one with a number if an interrupted command has left it or its log."""
    number, found = 1, folder
    while found.exists() or log_of(found).exists():
        number += 1
        found = folder.with_name(f"{folder.name}.{number}")
    return found


@asynccontextmanager
async def judge_of(cell: Cell, protocol: Protocol) -> AsyncIterator[list[str]]:
    """The protocol's judge until the body ends: yields options for `opd serve`, [] for its own."""
    if protocol.judge == "own":
        yield []
        return
    judge = ScriptedJudge(
        kind=protocol.judge, wished=cell.kinds, seed=cell.seed, believes=protocol.believes
    )
    async with judging(judge) as url:
        yield ["--judge-url", url, "--judge-model", NAME]


async def start_rates(
    endpoint: Endpoint, cell: Cell, protocol: Protocol, out: Path
) -> dict[str, list[int]]:
    """The untrained model's rates for all kinds; cells of one seed share them."""
    turned = protocol.change_of_mind
    name = f"seed{cell.seed}-n{protocol.n}-{protocol.model}-{protocol.words}"
    path = out / "starts" / f"{'-'.join((name, *turned))}.json"
    if not path.exists():
        clock = time.monotonic()
        rates = await measure(endpoint, WISHES, protocol.n, cell.seed, turned=turned)
        say(f"start, {time.monotonic() - clock:.0f} s: {shown_rates(rates)}")
        write_whole(path, as_counts(rates))
    return json.loads(path.read_text(encoding="utf-8"))


def write_whole(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


async def phases(served: Served, cell: Cell, protocol: Protocol, out: Path) -> dict[str, Any]:
    """All phases, from the first measurement to the last; returns what goes into the file."""
    start = await start_rates(served.endpoint, cell, protocol, out)
    quiet, objecting = Traffic(patience=Patience(0)), Traffic(patience=Patience(cell.objections))
    at_first = [WISHES[kind] for kind in cell.kinds]
    for number in range(protocol.quiet_sessions):
        await session(served.endpoint, cell, protocol, at_first, number, quiet)
    say(f"people: {quiet.as_numbers()} left quietly")
    rounds: list[dict[str, Any]] = []
    looks: list[dict[str, Any]] = []
    for number in range(protocol.rounds):
        rounds.append(await _round(served, cell, protocol, number, objecting, looks))
    last = rounds[-1]
    return {
        "start": start,
        "end": last["end"],
        "measuring_seconds": last["measuring_seconds"],
        "quiet": quiet.as_numbers(),
        "objecting": objecting.as_numbers(),
        "looks": looks,
        "waited": last["waited"],
        "hints": await served.hints(),
        "rounds": rounds,
    }


async def _round(
    served: Served,
    cell: Cell,
    protocol: Protocol,
    number: int,
    traffic: Traffic,
    looks: list[dict[str, Any]],
) -> dict[str, Any]:
    """People with fresh patience object, then it waits for their hints and measures everything.
    Adds to `traffic`, and to `looks`.
    """
    said, sessions = Counter(traffic.patience.said), traffic.sessions
    wishes = wishes_in(cell.kinds, protocol, number)
    traffic.patience = Patience(cell.objections)
    looks += await _people_object(served, cell, protocol, wishes, traffic)
    made = traffic.patience.said
    traffic.patience.said = said + made
    say(f"{traffic.sessions - sessions} sessions, objections: {dict(made)}")
    waited = await wait_for_hints(served, wait_s=protocol.wait_s, steady_s=protocol.steady_s)
    say(f"waited {waited['seconds']:.0f} s: {waited['ended']}; hints: {waited['hints']}")
    clock = time.monotonic()
    endpoint = served.endpoint
    if protocol.remembers:
        endpoint = replace(endpoint, memory=remembered(await served.hints()))
    turned = protocol.change_of_mind
    end = await measure(endpoint, cell.kinds, protocol.n, cell.seed, turned=turned)
    measuring_s = time.monotonic() - clock
    say(f"end, {measuring_s:.0f} s: {shown_rates(end)}")
    return {
        "sessions": traffic.sessions - sessions,
        "objections": dict(made),
        "turned": [one.kind for one in wishes if one is not WISHES[one.kind]],
        "waited": waited,
        "end": as_counts(end),
        "measuring_seconds": round(measuring_s, 1),
        "store": await what_became(served.folder),
    }


async def _people_object(
    served: Served, cell: Cell, protocol: Protocol, wishes: Sequence[Wish], traffic: Traffic
) -> list[dict[str, Any]]:
    """Sessions until patience is over; returns the measurements between them, if any."""
    looks: list[dict[str, Any]] = []
    most = traffic.sessions + protocol.sessions
    while traffic.sessions < most and not traffic.patience.is_over(cell.kinds):
        number = protocol.quiet_sessions + traffic.sessions
        await session(served.endpoint, cell, protocol, wishes, number, traffic)
        if cell.objections is None and traffic.sessions % protocol.every == 0:
            rates = await measure_wishes(served.endpoint, cell.kinds, protocol.n, cell.seed)
            looks.append({"sessions": number + 1, "rates": as_counts(rates)})
            say(f"after {number + 1} sessions: {shown_rates(rates)}")
            if all(rate.value >= HOLDS for rate in rates.values()):
                break
    return looks


async def session(
    endpoint: Endpoint,
    cell: Cell,
    protocol: Protocol,
    wishes: Sequence[Wish],
    number: int,
    traffic: Traffic,
    *,
    about: Sequence[Wish] | None = None,
) -> None:
    """One session of somebody with these wishes, or with some of many; sessions follow each other
    at the pace. `about`: the wishes that the errands come from, if not these.
    """
    clock = time.monotonic()
    rng = random.Random(f"{'+'.join(cell.kinds)}-{cell.seed}-{number}")
    wishes = wishes_of_one(rng, wishes)
    person = Person(
        rng=rng,
        travel=Travel(rng=random.Random(rng.randrange(2**40)), held_out=False),
        errands=errands_for(rng, wishes if about is None else about),
        wishes=wishes,
        patience=traffic.patience,
    )
    traffic.replies += await run_session(endpoint, person, asks_first=protocol.asks_first)
    traffic.sessions += 1
    await asyncio.sleep(max(0.0, clock + protocol.pace - time.monotonic()))
    traffic.seconds += time.monotonic() - clock


async def wait_for_hints(served: Served, *, wait_s: float, steady_s: float) -> dict[str, Any]:
    """Wait, at most `wait_s`, or until nothing has changed for `steady_s`; returns for how many
    seconds, why it ended (`no hint is practised`, `training stopped`, `nothing changes` or `time
    is up`), and counts of the hints by `standing`.
    """
    started = changed = time.monotonic()
    before: object = None
    while True:
        now = time.monotonic()
        hints, store = await served.hints(), await what_became(served.folder)
        if (hints, store) != before:
            before, changed = (hints, store), now
        ended = None
        is_done = none_practised(hints) and not AT_WORK & store["turns"].keys()
        is_stopped = why_stopped(served.folder) is not None and not goes_back(served.folder)
        if is_done and now - changed >= SETTLED_S:
            ended = "no hint is practised"
        elif is_stopped and now - changed >= SETTLED_S:
            ended = "training stopped"
        elif now - changed >= steady_s:
            ended = "nothing changes"
        elif now - started >= wait_s:
            ended = "time is up"
        if ended is not None:
            stand = dict(Counter(standing(hint) for hint in hints))
            return {"seconds": round(now - started, 1), "ended": ended, "hints": stand}
        await asyncio.sleep(POLL_S)


def standing(hint: Mapping[str, Any]) -> str:
    """How a hint stands: its status, or why it is not practised although it is active."""
    return hint["not_rehearsed"] or "active" if hint["status"] == "active" else hint["status"]


def remembered(hints: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hints that an agent would keep in its prompt: those of the memory (newest first), oldest
    first, without those that were contradicted, merged or withdrawn.
    """
    return [one["text"] for one in reversed(hints) if one["status"] == "active"]


def none_practised(hints: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are hints, and none of them is still to be practised."""
    return bool(hints) and all(standing(hint) != "active" for hint in hints)


def as_counts(rates: Rates) -> dict[str, list[int]]:
    """Hits and counts by name, for the file."""
    return {name: [rate.hits, rate.count] for name, rate in rates.items()}


def shown_rates(rates: Rates) -> str:
    """The rates in one line."""
    return ", ".join(f"{name} {rate.value:.2f}" for name, rate in rates.items())


def say(text: str) -> None:
    """Print a line about progress at once."""
    print(f"  {text}", flush=True)
