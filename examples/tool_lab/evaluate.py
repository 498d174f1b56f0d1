"""What the tool lab's model can do: rates with intervals on names that it has never seen.

`evaluate` is given a `generate` function, so that the same questions can go to a model in this
process, to an engine or to an endpoint. Skills are measured at temperature 1, like the policy's
samples; votes at 0.6, like the judge's.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

from examples.tool_lab.cases import (
    Case,
    GenerationRequest,
    Message,
    call_case,
    contrary_case,
    facts_case,
    hint_case,
    judge_case,
    other_preference_case,
    question_case,
    success_case,
)
from examples.tool_lab.preferences import TRAINED_KINDS
from examples.tool_lab.questions import QUESTIONS
from rollout_bridge.rehearsal import estimates

Generate = Callable[
    [list[GenerationRequest], float], Sequence[Message] | Awaitable[Sequence[Message]]
]
POLICY_TEMPERATURE = 1.0
JUDGE_TEMPERATURE = 0.6
OTHER_SKILLS = ("valid_calls", "copied_entities", "facts_in_answers", "other_preferences")
GROUPS = ("success", "other_skills", "contrary", "hints", "judge", "questions")
JUDGES = ("judge", "questions")


class Rate(estimates.Rate):
    """A measured rate as the lab writes it."""

    @property
    def shown(self) -> str:
        """`0.344 [0.239, 0.466]`."""
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


def build_cases(group: str, n: int, seed: int, kinds: Sequence[str] = TRAINED_KINDS) -> list[Case]:
    """`n` cases for each metric of a group (see GROUPS); equal seeds give equal cases.

    `kinds` are the trained preferences, which "success" and "contrary" are about.
    """
    rng = random.Random(f"{group}-{seed}")
    makers: list[Callable[[random.Random], Case]]
    if group == "success":
        makers = [lambda rng, kind=kind: success_case(rng, kind) for kind in kinds]
    elif group == "other_skills":
        makers = [call_case, facts_case, other_preference_case]
    elif group == "contrary":
        makers = [lambda rng, kind=kind: contrary_case(rng, kind) for kind in kinds]
    elif group == "hints":
        makers = [hint_case]
    elif group == "judge":
        makers = [judge_case]
    elif group == "questions":
        makers = [lambda rng, name=name: question_case(rng, name) for name in QUESTIONS]
    else:
        raise ValueError(f"unknown group {group!r}; known: {', '.join(GROUPS)}")
    return [make(rng) for make in makers for _ in range(n)]


def score_cases(cases: Sequence[Case], responses: Sequence[Message]) -> dict[str, Rate]:
    """Rates by metric. Raises ValueError unless there is exactly one response for each case."""
    hits: dict[str, int] = {}
    counts: dict[str, int] = {}
    for case, response in zip(cases, responses, strict=True):
        for metric, check in case.checks.items():
            outcome = check(response)
            if outcome is not None:
                hits[metric] = hits.get(metric, 0) + outcome
                counts[metric] = counts.get(metric, 0) + 1
    return {metric: Rate(hits=hits[metric], count=counts[metric]) for metric in counts}


async def evaluate(
    generate: Generate,
    n: int,
    seed: int,
    groups: Sequence[str] = GROUPS,
    kinds: Sequence[str] = TRAINED_KINDS,
) -> dict[str, Rate]:
    """Rates of all metrics of `groups`, `n` cases for each. `generate(requests, temperature)` may
    be async.
    """
    rates: dict[str, Rate] = {}
    for temperature in (POLICY_TEMPERATURE, JUDGE_TEMPERATURE):
        wanted = [g for g in groups if (g in JUDGES) == (temperature == JUDGE_TEMPERATURE)]
        cases = [case for group in wanted for case in build_cases(group, n, seed, kinds)]
        if not cases:
            continue
        generated = generate([case.request for case in cases], temperature)
        responses = await generated if inspect.isawaitable(generated) else generated
        rates |= score_cases(cases, responses)
    return rates


def worst_success(rates: Mapping[str, Rate]) -> float:
    """The worst of the trained preferences' success rates."""
    return min(rate.value for name, rate in rates.items() if name.startswith("success_"))


def table(rates: Mapping[str, Rate]) -> str:
    """One line per metric: rate, interval, number of answers."""
    lines = []
    for metric, rate in rates.items():
        low, high = rate.interval
        lines.append(f"{metric:24s} {rate.value:.3f}  [{low:.3f}, {high:.3f}]  n={rate.count}")
    return "\n".join(lines)
