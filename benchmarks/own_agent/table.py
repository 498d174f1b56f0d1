"""The headline table from the cells' results. Numbers in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.own_agent.cell import HOLDS
from benchmarks.own_agent.protocol import LATER
from benchmarks.own_agent.wishes import WISHES
from examples.tool_lab.evaluate import Rate

Result = Mapping[str, Any]
SKILLS = ("valid_calls", "copied_names", "facts")
HEADER = (
    "settings",
    "wishes",
    "objections",
    "seeds",
    "wish held",
    "open opposite",
    "of before",
    "untouched, usual value",
    "falls by",
    "calls, names, facts: worst of before",
    "versions",
    "live lessons expired",
    "rehearsed lessons: trained; dropped",
    "hints",
    "hints accepted; refuted; rules; practised",
    "waited, seconds",
)
UNTIL_HEADER = ("settings", "wishes", "seed", f"all hold >= {HOLDS:.2f} after", "objections", "s")


def grouped(results: Iterable[Result]) -> list[list[Result]]:
    """Results that differ only in their seed, together; fewer objections first."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for one in results:
        key = (one["digest"], tuple(one["kinds"]), one["asked_objections"])
        groups.setdefault(key, []).append(one)
    return sorted(groups.values(), key=_place)


def _place(group: Sequence[Result]) -> tuple[Any, ...]:
    first = group[0]
    asked = first["asked_objections"]
    return (settings_of(first), first["kinds"], asked is None, asked or 0)


def pooled(group: Sequence[Result], when: str, names: Iterable[str]) -> Rate | None:
    """The rate of these names and all seeds together; None without answers."""
    pairs = [one[when][name] for name in names for one in group if name in one[when]]
    count = sum(pair[1] for pair in pairs)
    return Rate(hits=sum(pair[0] for pair in pairs), count=count) if count else None


def names_of(group: Sequence[Result], rate: str) -> list[str]:
    """The names that a column combines: `wanted` and `contrary` of the wishes that people had in
    the end, `usual` of all other kinds.
    """
    kinds = group[0]["kinds"]
    if rate == "usual":
        wished = [*kinds, *(LATER | group[0]["protocol"])["others"]]
        return [f"usual_{kind}" for kind in WISHES if kind not in wished]
    turned = (LATER | group[0]["protocol"])["change_of_mind"]
    names = {"wanted": "usual_", "contrary": "contrary_turned_"}
    return [f"{names[rate] if kind in turned else rate + '_'}{kind}" for kind in kinds]


def before_after(group: Sequence[Result], rate: str) -> tuple[Rate | None, Rate | None]:
    """A column's rate, kinds and seeds together, at the start and at the end."""
    names = names_of(group, rate)
    return pooled(group, "start", names), pooled(group, "end", names)


def ratio(before: Rate | None, after: Rate | None) -> float | None:
    """`after` divided by `before`; None if that is not defined."""
    if before is None or after is None or before.hits == 0:
        return None
    return after.value / before.value


def fall_of(before: Rate | None, after: Rate | None) -> tuple[float, float, float] | None:
    """By how much a share fell, with the 95% interval of the difference (Newcombe's, of two Wilson
    intervals); None without answers.
    """
    if before is None or after is None:
        return None
    fall = before.value - after.value
    (low_b, high_b), (low_a, high_a) = before.interval, after.interval
    down = ((before.value - low_b) ** 2 + (high_a - after.value) ** 2) ** 0.5
    up = ((high_b - before.value) ** 2 + (after.value - low_a) ** 2) ** 0.5
    return fall, fall - down, fall + up


def table(results: Iterable[Result]) -> str:
    """The headline table as Markdown: one row for runs that differ only in their seed."""
    rows = [_row(group) for group in grouped(results)]
    return markdown(HEADER, rows)


def until_table(results: Iterable[Result]) -> str:
    """Sessions until all wishes hold, of people who never tire; "" if there were none."""
    rows = [
        _until_row(one)
        for group in grouped(results)
        for one in sorted(group, key=lambda one: one["seed"])
        if one["asked_objections"] is None and "baseline" not in one
    ]
    return markdown(UNTIL_HEADER, rows) if rows else ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(group: Sequence[Result]) -> Sequence[str]:
    first = group[0]
    asked = first["asked_objections"]
    wish, contrary, usual = (before_after(group, rate) for rate in ("wanted", "contrary", "usual"))
    made = _objections(group)
    return (
        settings_of(first),
        " and ".join(first["kinds"]),
        f"until they hold ({made} made)" if asked is None else f"{asked} ({made} made)",
        ", ".join(str(seed) for seed in sorted(one["seed"] for one in group)),
        f"{_value(wish[0])} → {shown(wish[1])}",
        f"{_value(contrary[0])} → {shown(contrary[1])}",
        _number(ratio(*contrary)),
        f"{_value(usual[0])} → {_value(usual[1])}, n {_count(usual[1])}",
        f"{shown_fall(fall_of(*usual))}; worst {worst_untouched(group)}",
        _worst_skill(group),
        ", ".join(str(one["store"]["version"]) for one in group),
        _expired(group),
        _lessons(group),
        _hints(group),
        _control(group),
        "; ".join(f"{one['waited']['seconds']:.0f} ({one['waited']['ended']})" for one in group),
    )


def worst_untouched(group: Sequence[Result]) -> str:
    """The kind whose usual value fell most, seeds pooled, with the fall's interval."""
    falls = {
        name: fall_of(pooled(group, "start", [name]), pooled(group, "end", [name]))
        for name in names_of(group, "usual")
    }
    known = {name: fall for name, fall in falls.items() if fall is not None}
    if not known:
        return "-"
    name = max(known, key=lambda name: known[name][0])
    return f"{name.removeprefix('usual_')} {shown_fall(known[name])}"


def _worst_skill(group: Sequence[Result]) -> str:
    ratios = {
        name: ratio(pooled(group, "start", [name]), pooled(group, "end", [name])) for name in SKILLS
    }
    known = {name: value for name, value in ratios.items() if value is not None}
    if not known:
        return "-"
    name = min(known, key=lambda name: known[name])
    return f"{known[name]:.3f} ({name.replace('_', ' ')})"


def _expired(group: Sequence[Result]) -> str:
    """Live turns with an accepted hint that became too old before their step, of all of them."""
    accepted = sum(one["store"]["accepted"] for one in group)
    stale = sum(one["store"]["drops"].get("stale", 0) for one in group)
    return f"{stale} of {accepted}"


def _hints(group: Sequence[Result]) -> str:
    """How the hints stand after the wait."""
    standing: Counter[str] = Counter()
    for one in group:
        standing.update(one["waited"]["hints"])
    return ", ".join(f"{n} {name}" for name, n in standing.most_common()) or "none"


def _control(group: Sequence[Result]) -> str:
    """What became of the judge's hints: turns with an accepted one, turns whose answer already did
    what it asks, hints that passed as rules, and hints with a trained lesson.
    """
    stores = [one["store"] for one in group]
    refuted = sum(store["drops"].get("hint_agrees", 0) for store in stores)
    rules, practised = (
        "-" if any(key not in store for store in stores) else str(sum(s[key] for s in stores))
        for key in ("rules", "practised")
    )
    return f"{sum(store['accepted'] for store in stores)}; {refuted}; {rules}; {practised}"


def _lessons(group: Sequence[Result]) -> str:
    """How many lessons of the rehearsal trained, and why others did not."""
    lessons: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    for one in group:
        lessons.update(one["store"]["lessons"])
        drops.update(one["store"]["lesson_drops"])
    trained = sum(n for name, n in lessons.items() if name.endswith(" trained"))
    why = ", ".join(f"{n} {reason}" for reason, n in drops.most_common())
    return f"{trained}; {why or 'none'}"


def _objections(group: Sequence[Result]) -> str:
    made = [sum(one["objecting"]["objections"].values()) for one in group]
    return ", ".join(str(number) for number in made)


def _until_row(one: Result) -> Sequence[str]:
    looks = one["looks"]
    held = next((look for look in looks if _all_hold(look["rates"])), None)
    sessions = one["quiet"]["sessions"] + one["objecting"]["sessions"]
    return (
        settings_of(one),
        " and ".join(one["kinds"]),
        str(one["seed"]),
        f"{held['sessions']} sessions" if held else f"not in {sessions} sessions",
        str(sum(one["objecting"]["objections"].values())),
        f"{one['quiet']['seconds'] + one['objecting']['seconds']:.0f}",
    )


def _all_hold(rates: Mapping[str, Sequence[int]]) -> bool:
    return all(hits >= HOLDS * count for hits, count in rates.values())


def settings_of(one: Result) -> str:
    """What distinguishes a result's protocol, in words."""
    protocol = LATER | one["protocol"]
    if protocol["remembers"]:
        return "untrained, the hints in every system prompt"
    if "baseline" in one:
        return f"baseline {one['baseline']}"
    judge = [] if protocol["judge"] == "own" else [f"judge {protocol['judge']}"]
    judge += ["that believes"] if protocol["believes"] else []
    judge += ["two tenants"] if protocol["poisoned"] else []
    rounds = [f"{protocol['rounds']} rounds"] if protocol["rounds"] > 1 else []
    rounds += [f"{kind} turned" for kind in protocol["change_of_mind"]]
    return ", ".join((*judge, *rounds, *protocol["settings"])) or "as documented"


def _value(rate: Rate | None) -> str:
    return "-" if rate is None else f"{rate.value:.3f}"


def shown(rate: Rate | None) -> str:
    """A rate with its interval."""
    return "-" if rate is None else rate.shown


def _count(rate: Rate | None) -> str:
    return "0" if rate is None else str(rate.count)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def shown_fall(fall: tuple[float, float, float] | None) -> str:
    """A fall with its interval."""
    return "-" if fall is None else f"{fall[0]:+.3f} [{fall[1]:+.3f}, {fall[2]:+.3f}]"
