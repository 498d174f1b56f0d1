"""Measure what is missing, print the table.

    python -m benchmarks.real_model --weights lora full --wishes sentence code poem
    python -m benchmarks.real_model --only-table

Each result is one JSON file in OUT and is not measured again; to continue after an interruption,
repeat the command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.own_agent.cell import (
    as_counts,
    free_folder,
    say,
    shown_rates,
    wait_for_hints,
    write_whole,
)
from benchmarks.own_agent.judging import NAME, judging
from benchmarks.own_agent.serving import ROOT, end_when_told, serving, what_became
from benchmarks.own_agent.table import markdown
from benchmarks.real_model.chat import MAX_TOKENS, converse, rates, wished_rate
from benchmarks.real_model.judge import RuleJudge
from benchmarks.real_model.text import perplexity
from benchmarks.real_model.wishes import WISHES, Wish
from examples.tool_lab.evaluate import Rate
from opd.commands.policy_export import export_version

Weights = Literal["lora", "full"]
MODEL = ROOT / "runs" / "models" / "smollm2-135m-instruct"
_NUM_DRAWS = 10_000
SETTINGS = (f"rehearsal.max_new_tokens={MAX_TOKENS}",)
HEADER = (
    "wish", "weights", "held: start → end", "the start with the hint", "of the way",
    "open opposite: start → end", "of before", "other kinds, usual: start → end",
    "perplexity: start → end", "steps", "minutes", "hints",
)  # fmt: skip


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a model folder")
    parser.add_argument("--weights", nargs="+", choices=get_args(Weights), default=["lora"])
    parser.add_argument("--wishes", nargs="+", choices=list(WISHES), default=list(WISHES))
    parser.add_argument(
        "--n",
        type=int,
        default=128,
        help="answers for each rate of other kinds; four times as many for the wish's own",
    )
    parser.add_argument("--quiet", type=int, default=24, help="sessions without an objection")
    parser.add_argument("--objections", type=int, default=3, help="sessions with an objection")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest wait for the hints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="for opd serve")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "real_model")
    parser.add_argument("--only-table", action="store_true", help="print what is in OUT")
    given = parser.parse_args()
    if not given.only_table:
        if not (given.model / "config.json").is_file():
            raise SystemExit(f"--model {given.model}: no model there; ./run.sh models gets one")
        try:
            asyncio.run(_measure(given))
        except asyncio.CancelledError:
            raise SystemExit("interrupted; repeat the command to continue") from None
    results = [json.loads(one.read_text()) for one in sorted(given.out.glob("*.json"))]
    print(markdown(HEADER, [row(one) for one in results if "wish" in one]))


async def _measure(given: argparse.Namespace) -> None:
    end_when_told()
    for weights in given.weights:
        for name in given.wishes:
            path = given.out / f"{name}-{weights}-seed{given.seed}.json"
            if not path.exists():
                say(path.stem)
                write_whole(path, await _cell(given, WISHES[name], weights))


async def _cell(given: argparse.Namespace, wish: Wish, weights: Weights) -> dict[str, Any]:
    """One run, from the first measurement to the last."""
    folder = free_folder(given.out / "runs" / f"{wish.name}-{weights}-seed{given.seed}")
    settings = [*SETTINGS, f"seed={given.seed}", *given.set]
    settings += ["trainer.lora=false"] if weights == "full" else []
    async with (
        judging(RuleJudge(seed=given.seed)) as url,
        serving(
            folder, settings, ["--judge-url", url, "--judge-model", NAME], model=given.model
        ) as served,
    ):
        client = served.endpoint.client
        start = await rates(client, wish, given.n, given.seed)
        start["hinted"] = await wished_rate(client, wish, given.n, given.seed, hinted=True)
        say(f"start: {shown_rates(start)}")
        rng = random.Random(f"people-{wish.name}-{given.seed}")
        objected = await converse(client, rng, wish, quiet=given.quiet, objections=given.objections)
        say(f"{given.quiet} quiet sessions, then {objected} objections")
        most_s = given.minutes * 60
        waited = await wait_for_hints(served, wait_s=most_s, steady_s=most_s)
        say(f"waited {waited['seconds'] / 60:.1f} minutes; hints: {waited['hints']}")
        end = await rates(client, wish, given.n, given.seed)
        say(f"end: {shown_rates(end)}")
    store = await what_became(folder)
    return {
        "wish": wish.name,
        "weights": weights,
        "seed": given.seed,
        "settings": settings,
        "start": as_counts(start),
        "end": as_counts(end),
        "waited": waited,
        "store": store,
        "perplexity": [perplexity(given.model), _perplexity_of(folder)],
    }


def _perplexity_of(folder: Path) -> float:
    """The perplexity of the version that was served last."""
    with tempfile.TemporaryDirectory() as scratch:
        merged = Path(scratch) / "model"
        export_version(folder / "config.toml", "latest", merged)
        return perplexity(merged)


def of_the_way(start: Rate, end: Rate, hinted: Rate) -> str:
    """`78% [54, 107]`: how much of the way from the start to the hinted start was gone, with its
    95% interval, from 10,000 draws of each rate's posterior under Jeffreys' prior, without those in
    which the hint does not help: they have no share.
    """
    room = hinted.value - start.value
    if room <= 0:
        return "none to go"
    rng = np.random.default_rng(0)
    begun, ended, most = (
        rng.beta(one.hits + 0.5, one.count - one.hits + 0.5, _NUM_DRAWS)
        for one in (start, end, hinted)
    )
    is_known = most > begun
    shares = (ended - begun)[is_known] / (most - begun)[is_known]
    low, high = np.quantile(shares, (0.025, 0.975))
    return f"{(end.value - start.value) / room:.0%} [{100 * low:.0f}, {100 * high:.0f}]"


def row(result: dict[str, Any]) -> Sequence[str]:
    """A row of the table."""
    start, end = (
        {name: Rate(hits=hits, count=count) for name, (hits, count) in result[when].items()}
        for when in ("start", "end")
    )
    others = [name for name in start if name.startswith("usual_")]
    before, after = result["perplexity"]
    return (
        result["wish"],
        result["weights"],
        f"{start['wished'].shown} → {end['wished'].shown}",
        start["hinted"].shown,
        of_the_way(start["wished"], end["wished"], start["hinted"]),
        f"{start['opposite'].shown} → {end['opposite'].shown}",
        f"{end['opposite'].value / start['opposite'].value:.3f}",
        ", ".join(f"{start[name].value:.2f} → {end[name].value:.2f}" for name in others),
        f"{before:.2f} → {after:.2f}",
        str(result["store"]["version"]),
        f"{result['waited']['seconds'] / 60:.0f}",
        ", ".join(f"{n} {name}" for name, n in result["waited"]["hints"].items()) or "none",
    )


if __name__ == "__main__":
    main()
