"""Rewards, evaluation and length: `openclaw_hint_judge`, `pass_at_k`, `length_penalties`,
`process_rewards`, `verl091_grpo_advantage`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from statistics import fmean
from typing import Any

import torch

from judge.votes.parsing import parse_answer
from judge.votes.rewards import majority_reward, parse_reward
from judge.votes.selection import longest
from opd.evaluation.figures.beta_binomial import BetaBinomial, fit_beta_binomial
from opd.evaluation.figures.pass_at_k import pass_at_k
from records.types import Vote
from rollout_bridge.scoring.hinting import hinted_messages
from tests.golden_maps.check import Case, Comparison, GoldenMap, Meta
from trainer.objectives.normalise import normalise
from trainer.rewards.groups import group_ids, grpo_advantages, grpo_passk_advantages
from trainer.rewards.length import anchor_penalty, group_lambda, group_penalty, uniform_penalty
from trainer.rewards.process import (
    marginal_utilities,
    outcome_mask,
    process_mask,
    returns,
    token_preserving_advantages,
)

CLOSE = 1e-9
"""Closed formulas in float64."""
FIT_TOLERANCE = 1e-6
"""Two optimisers of one flat likelihood."""
FLOAT32_STD_TOLERANCE = 1e-6
"""The reference's std of a group of one is a float32 constant in float64 runs too."""


def openclaw_hint_judge(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Both parsers, hint selection, the hinted messages and the majority of votes."""
    for index, entry in enumerate(case.get("parse", [])):
        score, hint = parse_answer(entry["text"])
        ours = {"score": score, "hint": hint, "prm_eval_score": parse_reward(entry["text"])}
        for name in ours.keys() & entry.keys():
            yield Comparison(name=f"parse {index}: {name}", ours=ours[name], reference=entry[name])
    for index, entry in enumerate(case.get("select", [])):
        chosen = longest([_vote(vote, place) for place, vote in enumerate(entry["votes"])])
        yield Comparison(
            name=f"select {index}",
            ours=next(({"score": vote.score, "hint": vote.hint} for vote in chosen), None),
            reference=entry["selected"],
        )
    for index, entry in enumerate(case.get("append", [])):
        yield Comparison(
            name=f"append {index}",
            ours=hinted_messages(entry["messages"], entry["hint"]),
            reference=entry["enhanced"],
        )
    for entry in case.get("majority", []):
        yield Comparison(
            name=f"majority {entry['votes']}",
            ours=majority_reward(entry["votes"]),
            reference=entry["score"],
        )


def _vote(vote: Mapping[str, Any], index: int) -> Vote:
    return Vote(
        index=index,
        score=vote["score"],
        hint=vote["hint"] or "",
        text="",
        latency_s=0.0,
        prompt_tokens=None,
        completion_tokens=None,
    )


def pass_at_k_table(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Unbiased and plug-in estimates, expectations under a model, its posterior and its fit."""
    for entry in case.get("unbiased", []):
        n, c, k = entry["n"], entry["c"], entry["k"]
        ours = {"pass_at_k": pass_at_k(n, c, k), "bernoulli_plugin": _plug_in(n, c, k)}
        for name in ours.keys() & entry.keys():
            yield Comparison(
                name=f"{name} n={n} c={c} k={k}",
                ours=ours[name],
                reference=entry[name],
                tolerance=CLOSE,
            )
        if "exact" in entry:
            yield Comparison(
                name=f"exact n={n} c={c} k={k}",
                ours=ours["pass_at_k"],
                reference=float(Fraction(entry["exact"])),
                tolerance=CLOSE,
            )
    for kind in ("beta_expected", "beta_posterior"):
        for entry in case.get(kind, []):
            model = BetaBinomial(alpha=entry["alpha"], beta=entry["beta"])
            if kind == "beta_posterior":
                model = model.posterior(entry["c"], entry["n"])
            yield Comparison(
                name=f"{kind} {entry}",
                ours=model.pass_at_k(entry["k"]),
                reference=entry["expected_pass_at_k"],
                tolerance=CLOSE,
            )
    if "beta_binomial_mle" in case:
        yield from _fit(case["beta_binomial_mle"])


def _plug_in(n: int, c: int, k: int) -> float:
    """The reference's estimate by k independent tries that each succeed like one of ours."""
    return 1.0 - (1.0 - pass_at_k(n, c, 1)) ** k


def _fit(entry: Mapping[str, Any]) -> Iterator[Comparison]:
    counts = [(int(c), int(n)) for c, n in entry["counts_c_n"]]
    fit = fit_beta_binomial(counts)
    tables = {
        "pass_at_k": fit.model.pass_at_k,
        "mean_plugin_bernoulli": lambda k: fmean(_plug_in(n, c, k) for c, n in counts),
    }
    scalars = {
        "alpha_hat": fit.model.alpha,
        "beta_hat": fit.model.beta,
        "loglik": fit.log_likelihood,
    }
    for name, ours in scalars.items():
        yield Comparison(
            name=f"fit: {name}", ours=ours, reference=entry[name], tolerance=FIT_TOLERANCE
        )
    for name, estimate in tables.items():
        for k, reference in entry[name].items():
            yield Comparison(
                name=f"fit: {name} at {k}",
                ours=estimate(int(k)),
                reference=reference,
                tolerance=FIT_TOLERANCE,
            )


def length_penalties(case: Case, meta: Meta) -> Iterator[Comparison]:
    """The three penalties; coefficients and anchors are part of the fields' names."""
    defaults = meta.get("defaults", {})
    for index, entry in enumerate(case.get("per_sample", [])):
        rewards, lengths = _column([entry["R"]]), _column([entry["L"]])
        for name, reference in entry.items():
            if name in ("R", "L"):
                continue
            options = _options(name, defaults)
            if name.startswith("uniform"):
                ours = uniform_penalty(rewards, lengths, coef=options["alpha"])
            else:
                anchors = _column([options["anchor"]])
                ours = anchor_penalty(rewards, lengths, anchors, coef=options["gamma"])
            yield Comparison(
                name=f"sample {index}: {name}", ours=ours, reference=reference, tolerance=CLOSE
            )
    for index, entry in enumerate(case.get("group", [])):
        correct, lengths = _column(entry["correct"]), _column(entry["lengths"])
        for name in entry.keys() - {"correct", "lengths"}:
            if name == "lambda":
                ours = group_lambda(lengths)
            else:
                coefficient = _options(name, defaults)["beta"]
                ours = group_penalty(correct, lengths, correct, coef=coefficient)
            yield Comparison(
                name=f"group {index}: {name}", ours=ours, reference=_column(entry[name])
            )


def _options(name: str, defaults: Mapping[str, float]) -> dict[str, float]:
    """`anchor_530_gamma_0.01` -> {"anchor": 530, "gamma": 0.01}, over the file's defaults."""
    words = name.split("_")
    numbers = {
        word: float(number) for word, number in itertools.pairwise(words) if number[:1].isdigit()
    }
    return {**defaults, **numbers}


def _column(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def process_rewards(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Both kinds of normalisation with their masks, and the utilities of the file's example."""
    rewards_BT, mask_BT = case["inputs"]["rewards"], case["inputs"]["mask"]
    separate = token_preserving_advantages(rewards_BT, mask_BT)
    ours = {
        "outcome_mask": outcome_mask(mask_BT),
        "process_mask": process_mask(rewards_BT, mask_BT),
        # All token rewards normalised together: the variant to compare with.
        "naive_token_preserving_adv": returns(
            normalise(rewards_BT, mask_BT, epsilon=0.0).values, mask_BT
        ),
        "separately_normalised_rewards": separate.rewards,
        "separately_normalised_adv": separate.advantages,
    }
    for name, reference in case["outputs"].items():
        yield Comparison(name=name, ours=ours.get(name), reference=reference)
    example = meta.get("marginal_utility_example")
    if example:
        yield Comparison(
            name="marginal utilities",
            ours=marginal_utilities(_column(example["V"])),
            reference=_column(example["U"]),
        )


def verl_grpo_advantage(case: Case, meta: Meta) -> Iterator[Comparison]:
    """GRPO, Dr.GRPO and the pass@k variant, by the case's name."""
    inputs, options = case["inputs"], case.get("kwargs", {})
    rewards_BT, mask_BT = inputs["token_level_rewards"], inputs["response_mask"]
    groups_B = group_ids(inputs["index"])
    given = {
        ours: options[theirs]
        for ours, theirs in (
            ("divide_by_std", "norm_adv_by_std_in_grpo"),
            ("epsilon", "epsilon"),
        )
        if theirs in options
    }
    variant = grpo_passk_advantages if "passk" in case["name"] else grpo_advantages
    is_double = rewards_BT.dtype == torch.float64
    has_singleton = 1 in Counter(inputs["index"]).values()
    yield Comparison(
        name="advantages",
        ours=variant(rewards_BT, mask_BT, groups_B, **given),
        reference=case["outputs"]["advantages"],
        tolerance=FLOAT32_STD_TOLERANCE if is_double and has_singleton else None,
    )


MAPS: dict[str, GoldenMap] = {
    "openclaw_hint_judge": openclaw_hint_judge,
    "pass_at_k": pass_at_k_table,
    "length_penalties": length_penalties,
    "process_rewards": process_rewards,
    "verl091_grpo_advantage": verl_grpo_advantage,
}
