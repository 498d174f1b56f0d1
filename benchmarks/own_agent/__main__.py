"""Whether `opd serve` learns from people other than the lab's: measure what is missing, print the
table.

    python -m benchmarks.own_agent --kinds unit order --seeds 0 1 2
    python -m benchmarks.own_agent --kinds unit+order --objections until --seeds 0
    python -m benchmarks.own_agent --kinds unit --set rehearsal.enabled=false --seeds 0
    python -m benchmarks.own_agent --kinds unit --remember --seeds 0
    python -m benchmarks.own_agent --kinds unit+order --objections 3 --seeds 0 --judge contrary
    python -m benchmarks.own_agent --kinds unit+order+room+rounding+detail+code+title \\
        --objections 3 --seeds 0 --rounds 5 --change-of-mind order room
    python -m benchmarks.own_agent --kinds unit --objections 10 --seeds 0 --poisoned --others order
    python -m benchmarks.own_agent --only-table

For each kind of wish (or several at once, as in unit+order), seed and number of objections, `opd
serve` runs as documented in a folder of its own, one session at a time. Each result is one JSON
file in OUT and is not measured again; to continue after an interruption, repeat the command.

`--judge` replaces the model's own judge with a scripted one: a control. `none` gives no hint,
`random` answers at random, `contrary` gives the hint for the opposite of the wish, and `off-topic`
that of another kind. The last two answer correctly that such a hint is not a rule that the words
ask for; with `--judge-believes` they answer that it is one, so that it is practised. A hint that
the answer already followed is refuted unless `--set scoring.least_fall=0`.

With `--rounds N` people with fresh patience come N times; from the middle round on, their wishes of
the kinds in `--change-of-mind` are reversed.

`--poisoned`: two tenants with keys of their own. The people of one object as usual; those of the
other are quiet, or wish what `--others` names. The measurements use the key of the latter.

For other ways to learn from a run's objections see `python -m benchmarks.own_agent.baselines`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.own_agent import poisoned
from benchmarks.own_agent.cell import measured_cell
from benchmarks.own_agent.people import words_checksum
from benchmarks.own_agent.picture import picture
from benchmarks.own_agent.protocol import Cell, Protocol
from benchmarks.own_agent.rounds import rounds_table
from benchmarks.own_agent.scripted import JUDGES
from benchmarks.own_agent.serving import end_when_told, model_checksum
from benchmarks.own_agent.table import table, until_table
from benchmarks.own_agent.turned import HINTS, TURNED
from benchmarks.own_agent.wishes import WISHES

UNTIL = "until"
UNTRAINED = ("rehearsal.enabled=false", "trainer.rollout_batch_size=4096")
"""No batch is ever full."""


def main() -> None:
    """Measure, and print."""
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only_table:
        files = sorted(arguments.out.glob("*.json"))
        results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    else:
        try:
            results = asyncio.run(measured(arguments))
        except asyncio.CancelledError:
            raise SystemExit("interrupted; repeat the command to continue") from None
    if not results:
        raise SystemExit(f"no results in {arguments.out}")
    (arguments.out / "before_and_after.svg").write_text(picture(results), encoding="utf-8")
    parts = (
        table(results),
        until_table(results),
        rounds_table(results),
        poisoned.poisoned_table(results),
    )
    print("\n" + "\n\n".join(part for part in parts if part))


async def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells that the arguments name, one after another. When told to end, it ends what it has
    started.
    """
    end_when_told()
    protocol = Protocol(
        quiet_sessions=arguments.quiet_sessions,
        sessions=arguments.sessions,
        n=arguments.n,
        pace=arguments.pace,
        wait_s=arguments.wait,
        steady_s=arguments.steady,
        every=arguments.every,
        model=model_checksum(),
        words=words_checksum(*further_words(arguments)),
        asks_first=arguments.asks_first,
        settings=tuple(arguments.set) + (UNTRAINED if arguments.remember else ()),
        remembers=arguments.remember,
        judge=arguments.judge,
        believes=arguments.judge_believes,
        rounds=arguments.rounds,
        change_of_mind=tuple(arguments.change_of_mind),
        poisoned=arguments.poisoned,
        others=tuple(arguments.others),
    )
    run = poisoned.phases if arguments.poisoned else None
    results = []
    for kinds in arguments.kinds:
        for seed in arguments.seeds:
            for objections in arguments.objections:
                cell = Cell(kinds=kinds, seed=seed, objections=objections)
                print(cell.name(protocol), flush=True)
                clock = time.monotonic()
                results.append(await measured_cell(cell, protocol, arguments.out, run))
                _say_pace(results[-1], time.monotonic() - clock)
    return results


def further_words(arguments: argparse.Namespace) -> list[object]:
    """The words besides those of the wishes that these arguments make people and judges use."""
    turned: list[object] = [TURNED] if arguments.change_of_mind else []
    return turned if arguments.judge == "own" else [*turned, TURNED, HINTS]


def _say_pace(result: dict[str, Any], seconds: float) -> None:
    people = (result["quiet"], result["objecting"])
    sessions, talked = (sum(one[key] for one in people) for key in ("sessions", "seconds"))
    pace = f", {60 * sessions / talked:.1f} sessions a minute" if talked else ""
    print(f"  {sessions} sessions{pace}; {seconds:.0f} s", flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_agent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kinds", nargs="+", type=kinds_of, default=[(kind,) for kind in WISHES])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add(
        "--objections",
        nargs="+",
        type=objections_of,
        default=[1, 3, 10],
        help=f"objections to each wish before people stop; {UNTIL}: until the wishes hold",
    )
    add("--sessions", type=int, default=60, help="most sessions in which people object")
    add(
        "--quiet-sessions",
        type=int,
        default=12,
        help="sessions before that, of people who silently leave when they do not like something",
    )
    add("--n", type=int, default=256, help="requests for each rate")
    add("--pace", type=float, default=2.0, help="least seconds from session to session")
    add("--wait", type=float, default=300.0, help="longest wait for the hints, seconds")
    add("--steady", type=float, default=90.0, help="the wait ends if nothing changes for this long")
    add("--every", type=int, default=10, help=f"sessions between two checks, with {UNTIL}")
    add(
        "--asks-first",
        action="store_true",
        help="the agent asks before it calls, and objections replace the call's result",
    )
    add(
        "--remember",
        action="store_true",
        help="train nothing: the agent keeps the hints in its system prompt (a baseline)",
    )
    add("--judge", choices=JUDGES, default="own", help="a scripted one (a control)")
    add("--judge-believes", action="store_true", help="it says that users asked for its hints")
    add("--rounds", type=int, default=1, help="how often people object, each time with a wait")
    add("--change-of-mind", nargs="+", choices=list(WISHES), default=[], metavar="KIND")
    add("--poisoned", action="store_true", help="two tenants, one of which objects")
    add("--others", nargs="+", choices=list(WISHES), default=[], metavar="KIND")
    add("--set", action="append", default=[], help="for opd serve: section.key=value")
    add("--out", type=Path, default=Path("runs/own_agent"))
    add("--only-table", action="store_true", help="measure nothing: print what is in OUT")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.change_of_mind and arguments.rounds < 2):
        parser.error("--rounds: at least 1, or 2 with --change-of-mind")
    if arguments.others and not arguments.poisoned:
        parser.error("--others are the wishes of the second tenant: add --poisoned")
    if arguments.poisoned and (arguments.rounds > 1 or arguments.remember):
        parser.error("--poisoned needs a single round and a policy that learns")
    if any(kind in arguments.others for kinds in arguments.kinds for kind in kinds):
        parser.error("--others: name other kinds than --kinds")
    return arguments


def kinds_of(text: str) -> tuple[str, ...]:
    """`unit+order` as kinds. Raises ArgumentTypeError for unknown ones."""
    kinds = tuple(text.split("+"))
    unknown = [kind for kind in kinds if kind not in WISHES]
    if unknown or len(set(kinds)) < len(kinds):
        raise argparse.ArgumentTypeError(f"{text}: choose some of {', '.join(WISHES)}, each once")
    return kinds


def objections_of(text: str) -> int | None:
    """A number of at least 1; None for `until`. Raises ArgumentTypeError for anything else."""
    if text == UNTIL:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1, or {UNTIL}")
    return int(text)


if __name__ == "__main__":
    main()
