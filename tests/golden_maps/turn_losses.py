"""Losses of whole batches of turns, by independent arithmetic: `composed_weights`,
`post_tool_weights`, `opd_eligibility`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.golden_maps.check import FLOAT32_TOLERANCE, Case, Comparison, GoldenMap, Meta
from tests.golden_maps.turns import Run, Turn, past_answers
from trainer.batch.token_batch import BatchTotals

NO_WEIGHTS = {"importance_level": "none"}


def composed_weights(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Loss and gradients of the surrogates `decoupled`, with and without `engine_cap`, and `a3po`.
    A case gives advantages; a teacher gives them as its gap.
    """
    options = dict(case["kwargs"])
    aggregation = options.pop("aggregation")
    if options["engine_cap"] is None:
        del options["engine_cap"]
    turns = [
        Turn(
            prompt=str(place),
            l=one["l"],
            lo=one["lo"],
            lt=_gap_of(one),
            mu=one["mu"],
            lk=one["lk"],
            gap=one["gap"],
            traits={},
        )
        for place, one in enumerate(case["inputs"]["turns"])
    ]
    run = Run(turns, {"objective": options, "correction": NO_WEIGHTS, "aggregation": aggregation})
    yield from _loss_and_gradient(run, case)


def post_tool_weights(case: Case, meta: Meta) -> Iterator[Comparison]:
    """The weights of rollout correction with a lower cap behind tool results: their mean, the loss,
    the gradients, and how many were bounded.
    """
    options = {name: value for name, value in case["kwargs"].items() if value is not None}
    aggregation = options.pop("aggregation")
    turns = [
        Turn(
            prompt=str(place),
            l=one["l"],
            lo=one["lo"],
            lt=_gap_of(one),
            mu=one["mu"],
            traits={"after_tool": one["post_tool"]},
        )
        for place, one in enumerate(case["inputs"]["turns"])
    ]
    run = Run(turns, {"correction": options, "aggregation": aggregation})
    totals, _ = run.gradients()
    yield Comparison(
        name="mean weight",
        ours=totals.reduced["tis"],
        reference=case["outputs"]["mean_weight"],
        tolerance=FLOAT32_TOLERANCE,
    )
    yield from _loss_and_gradient(run, case)
    name = "rollout_corr/post_tool/bounded_fraction"
    yield Comparison(
        name=name,
        ours=run.correction_metrics().get(name),
        reference=case["outputs"].get("bounded_fraction", _absent(options)),
    )


def _absent(options: dict[str, Any]) -> float | None:
    """A share of nothing, or no such metric."""
    return math.nan if "post_tool_upper" in options else None


def opd_eligibility(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Where the teacher acts and where a reward does, with K2 as a loss or the gap as an advantage:
    both parts at each token, loss and gradients.
    """
    inputs, outputs = case["inputs"], case["outputs"]
    options = dict(case["kwargs"])
    aggregation, name = options.pop("aggregation"), options.pop("objective")
    if name == "supervised_opd":
        assert not options.pop("normalise"), "a loss is not standardised"
        options["estimator"] = "k2"
    turns = [
        Turn(
            prompt=one["prompt"],
            l=one["l"],
            lo=one["lo"],
            lt=one["lt"],
            mu=one["lo"],
            traits={
                "reward": one["reward"] if math.isfinite(one["reward"]) else None,
                "is_cut": one["cut"],
                "history": past_answers(inputs["past"], one["prompt"]),
            },
        )
        for one in inputs["turns"]
    ]
    run = Run(
        turns,
        {
            "objective": {"name": name, **options},
            "correction": NO_WEIGHTS,
            "aggregation": aggregation,
        },
    )
    for place, (view, turn) in enumerate(zip(run.prepared.views, turns, strict=True)):
        finite = torch.isfinite(torch.tensor(turn.lo))
        yield Comparison(
            name=f"turn {place}: where the teacher acts",
            ours=(view.opd_valid * finite).int().tolist(),
            reference=outputs["acts"][place],
        )
    totals, _ = run.gradients()
    for place, ours in enumerate(_advantages(run, totals, name, options["reward_coef"])):
        yield Comparison(
            name=f"turn {place}: advantages",
            ours=ours,
            reference=torch.tensor(outputs["advantages"][place]),
        )
    yield from _loss_and_gradient(run, case)
    if options["pass_rate_threshold"] is not None:
        metric = "opd/frac_underperforming_prompts"
        yield Comparison(
            name=metric,
            ours=run.metrics()[metric],
            reference=outputs["frac_underperforming_prompts"],
        )


def _advantages(run: Run, totals: BatchTotals, name: str, reward_coef: float) -> list[Tensor]:
    """Of the policy gradient at each token that trains, 0 at others: of both, or beside a loss of
    the reward alone.
    """
    if name == "hindsight_opd":
        found = [torch.from_numpy(totals.advantages[turn]) for turn in range(len(run.samples))]
        return [torch.nan_to_num(one, nan=0.0) for one in found]
    return [
        torch.where(
            torch.isfinite(torch.from_numpy(totals.advantages[turn])),
            reward_coef * view.reward_advantage,
            0.0,
        )
        for turn, view in enumerate(run.prepared.views)
    ]


def _gap_of(turn: Case) -> list[float]:
    """The teacher whose gap to the student before the step is the advantage."""
    return [
        lo + advantage if math.isfinite(lo) else -1.0
        for lo, advantage in zip(turn["lo"], turn["a"], strict=True)
    ]


def _loss_and_gradient(run: Run, case: Case) -> Iterator[Comparison]:
    outputs = case["outputs"]
    totals, gradients = run.gradients()
    yield Comparison(
        name="loss",
        ours=totals.reduced["loss"],
        reference=outputs["loss"],
        tolerance=FLOAT32_TOLERANCE,
    )
    references: Sequence[Sequence[float]] = outputs["grad"]
    for place, (ours, reference) in enumerate(zip(gradients, references, strict=True)):
        yield Comparison(
            name=f"turn {place}: gradient", ours=ours, reference=torch.tensor(reference)
        )


MAPS: dict[str, GoldenMap] = {
    "composed_weights": composed_weights,
    "opd_eligibility": opd_eligibility,
    "post_tool_weights": post_tool_weights,
}
