"""Advantages that rewards give the turns of a batch, by independent arithmetic: `length_rewards`,
`process_baseline`, `session_baseline`, `start_kl_rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from records.types import PastSession, SessionOutcome
from tests.golden_maps.check import FLOAT32_TOLERANCE, Case, Comparison, GoldenMap, Meta
from tests.golden_maps.turns import Run, Turn, first_answers, past_answers

REWARDED = {"opd_coef": 0.0, "reward_coef": 1.0}
LONG = 100
"""Tokens of an answer longer than any anchor of the cases."""


def start_kl_rewards(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Rewards that are charged for the distance from the start, before their baseline."""
    yield from _answers(case)


def length_rewards(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Penalties that warm up and spare hard prompts, cut answers, anchors of each prompt."""
    if "anchor" in case["outputs"]:
        yield Comparison(
            name="anchor",
            ours=_anchor(case["inputs"]["answers"]),
            reference=case["outputs"]["anchor"],
            tolerance=FLOAT32_TOLERANCE,
        )
        return
    yield from _answers(case)


def _answers(case: Case) -> Iterator[Comparison]:
    inputs, outputs = case["inputs"], case["outputs"]
    options = {name: value for name, value in case["kwargs"].items() if value is not None}
    step = options.pop("steps")
    if options["length_penalty"] == "none":
        options.pop("length_coef", None)
    if isinstance(options.get("length_anchor"), float):
        options["length_anchor"] = int(options["length_anchor"])
    charges = options["reward_kl_coef"] > 0
    turns = [
        Turn(
            prompt=one["prompt"],
            l=one["lo"],
            lo=one["lo"],
            lt=None,
            mu=one["lo"],
            lf=one["lf"] if charges else None,
            traits={
                "reward": one["reward"] if math.isfinite(one["reward"]) else None,
                "is_cut": one["cut"],
                "step_index": one["step"],
                "history": past_answers(inputs["past"], one["prompt"], one["anchor"]),
            },
        )
        for one in inputs["turns"]
    ]
    run = Run(turns, {"objective": {**REWARDED, **options}}, step=step)
    yield from _advantages(run, outputs["advantages"])
    names = {"start_kl": "reward/start_kl", "compared_frac": "reward/compared_frac"}
    for name in names.keys() & outputs.keys():
        yield Comparison(
            name=names[name],
            ours=run.metrics()[names[name]],
            reference=outputs[name],
            tolerance=FLOAT32_TOLERANCE,
        )


def _anchor(answers: Sequence[tuple[int, int]]) -> float | None:
    """What an answer of LONG tokens loses says how many would have cost nothing."""
    zeros = [-1.0] * LONG
    turn = Turn(
        prompt="a",
        l=zeros,
        lo=zeros,
        lt=None,
        mu=zeros,
        traits={"reward": 1.0, "history": first_answers(answers)},
    )
    options = {"length_penalty": "anchor", "length_anchor": "first_pass", "length_coef": 1.0}
    run = Run([turn], {"objective": {**REWARDED, **options}})
    (advantage,) = run.reward_advantages()
    return None if advantage == 1.0 else LONG / (2.0 - advantage)


def session_baseline(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Sessions compared with others that began with the same prompt."""
    yield from _sessions(case)


def process_baseline(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Utilities of turns and outcomes of sessions, each normalised among their own kind."""
    yield from _sessions(case)


def _sessions(case: Case) -> Iterator[Comparison]:
    inputs, outputs = case["inputs"], case["outputs"]
    turns = []
    for name, index in inputs["turns"]:
        own = inputs["sessions"][name]
        past = tuple(
            PastSession(
                session_id=f"past {place}",
                version=0,
                outcome=one["outcome"],
                values=_values(f"past {place}", one),
            )
            for place, one in enumerate(inputs["past"])
            if one["first"] == own["first"]
        )
        session = SessionOutcome(
            outcome=own["outcome"], start=own["first"], past=past, values=_values(name, own)
        )
        turns.append(
            Turn(
                prompt=f"{name}-{index}",
                l=[-1.0, -2.0],
                lo=[-1.0, -2.0],
                lt=None,
                mu=[-1.0, -2.0],
                traits={
                    "turn_id": f"{name}-{index}",
                    "session_id": name,
                    "step_index": index,
                    # What the outcome makes of it; the baseline goes by the sessions.
                    "reward": 2.0 * own["outcome"] - 1.0,
                    "session": session,
                },
            )
        )
    options = {**REWARDED, "reward_outcome": "only", **case["kwargs"]}
    run = Run(turns, {"objective": options})
    yield from _advantages(run, outputs["advantages"])
    yield Comparison(
        name="reward/compared_frac",
        ours=run.metrics()["reward/compared_frac"],
        reference=outputs["compared_frac"],
    )


def _values(name: str, session: Case) -> tuple[tuple[str, float | None], ...]:
    """What the turns on a session's path were worth, by their ids."""
    if session.get("values") is None:
        return ()
    path: Any = session["path"]
    return tuple(
        (f"{name}-{index}", value) for index, value in zip(path, session["values"], strict=True)
    )


def _advantages(run: Run, references: Sequence[float]) -> Iterator[Comparison]:
    for place, (ours, reference) in enumerate(
        zip(run.reward_advantages(), references, strict=True)
    ):
        yield Comparison(
            name=f"turn {place}: advantage",
            ours=ours,
            reference=reference,
            tolerance=FLOAT32_TOLERANCE,
        )


MAPS: dict[str, GoldenMap] = {
    "length_rewards": length_rewards,
    "process_baseline": process_baseline,
    "session_baseline": session_baseline,
    "start_kl_rewards": start_kl_rewards,
}
