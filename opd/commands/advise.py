"""Which rollout correction the sources would choose for a run, and the figures they would look at.

The questions are those of the off-policy post's decision tree, the remedies those of verl's page on
rollout correction (ALGORITHMS 4). It reads `metrics.jsonl` and the configuration, and changes
nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opd.cluster.routing import replay_for
from opd.report.curves import metric_rows
from opd.run import config as run_config
from opd.run.config import RunConfig
from trainer.config import TrainerConfig
from trainer.errors import StartupError
from trainer.model.model_config import has_experts
from trainer.objectives.options import HindsightOpd
from trainer.objectives.rollout_correction.settings import MODES, health_warnings

SAME_ARITHMETIC = 1e-3
"""Trainer and engine count as equal up to this difference, in nats per token."""
NEWEST = 50
"""Number of newest steps that are examined."""
ENGINE_CAP = 2.0
"""Cap of the engine's own ratio beside decoupled PPO: the source names 2 to 10."""
VERSIONS_AHEAD = 4
"""How far generation may run ahead of training: the source names 4 for code."""
MOST_AHEAD = 8
"""The most that it names, for mathematics."""
TOOL_SPREAD = 2.0
"""Ratios after tool output need more if their spread is this many times that of other tokens."""

_REMEDIES = {
    "rollout_is_std_unclamped": "use rejection instead of weights for whole turns, or a tighter "
    'cap: trainer.correction.preset = "geo_rs", or a lower trainer.correction.importance_upper',
    "rollout_is_eff_sample_size_unclamped": "few tokens carry the step: "
    'trainer.correction.preset = "geo_rs", or a lower trainer.max_staleness',
    "rollout_is_veto_fraction": "lower trainer.correction.veto_threshold; if ratios that small are "
    "common, engine and trainer do not have the same weights",
    "rollout_is_mean_raw": "the shift is systematic: compare precision, template and weights of "
    "engine and trainer before any correction",
    "kl_fresh": "engine and trainer disagree on fresh tokens: compare their precision and weights; "
    "no correction makes up for that",
    "kl": "samples are too old for this learning rate: a lower trainer.max_staleness",
    "chi2_token": "samples are too far off: a lower trainer.max_staleness, or "
    'trainer.correction.preset = "geo_rs"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`seen`: figures of the run. `set_these`: what to set; empty if the run has it already."""

    question: str
    seen: str
    choice: str
    set_these: tuple[str, ...] = ()


def advise_run(config_path: Path) -> list[Advice]:
    """Advice on a run. Raises StartupError if nothing was trained yet."""
    folder = config_path.parent
    rows = [row for row in metric_rows(folder) if row.get("skipped") is None][-NEWEST:]
    if not rows:
        raise StartupError(f"{folder}: no step has trained yet, so there are no figures to go by")
    config = run_config.load(config_path)
    return list(advice(config, rows, is_mixture=has_experts(config.model)))


def advice(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], *, is_mixture: bool
) -> Iterator[Advice]:
    """Advice from the newest steps' `rows` (metrics.jsonl, at least one)."""
    trainer = config.trainer
    age = _on_age(config, rows)
    yield _on_arithmetic(trainer, rows, is_answered=bool(age.set_these))
    yield age
    yield from _on_schedule(trainer, rows)
    yield _on_experts(config, is_mixture=is_mixture)
    yield from _on_tools(config, rows)
    yield from _on_health(rows)


def _on_arithmetic(
    trainer: TrainerConfig, rows: Sequence[Mapping[str, Any]], *, is_answered: bool
) -> Advice:
    """`is_answered`: the advice is decoupled PPO, whose weights are ratios to the engine."""
    question = "Do engine and trainer compute alike?"
    found = _largest(rows, "rollout_corr/kl_fresh")
    has_weights = trainer.correction.settings().importance_level is not None
    objective = trainer.objective
    weighs_itself = isinstance(objective, HindsightOpd) and objective.surrogate in (
        "decoupled",
        "a3po",
    )
    wanted = () if has_weights or weighs_itself or is_answered else _TOKEN_WEIGHTS
    if found is None:
        return Advice(
            question=question,
            seen="no step had tokens of the newest weights",
            choice="unknown; token weights (TIS) are right in either case",
            set_these=wanted,
        )
    seen = f"KL of fresh tokens at most {found:.2g} nats in {len(rows)} steps"
    if found <= SAME_ARITHMETIC:
        return Advice(question=question, seen=seen, choice="they do: nothing to correct here")
    return Advice(
        question=question,
        seen=seen,
        choice="they do not: token weights (TIS) and clipping",
        set_these=wanted,
    )


_TOKEN_WEIGHTS = ('trainer.correction.preset = "token_is"',)


def _on_age(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Advice:
    trainer = config.trainer
    question = "Do samples of older weights train?"
    oldest = _largest(rows, "staleness_max")
    if oldest is None:
        return Advice(question=question, seen="staleness was not recorded", choice="unknown")
    seen = f"at most {oldest:.0f} versions old; {_bound(trainer)}"
    if not oldest:
        return Advice(question=question, seen=seen, choice="no: no correction for age")
    objective = trainer.objective
    if not isinstance(objective, HindsightOpd):
        choice = f"yes: bound their age; {objective.name} has no ratio to correct"
        return Advice(question=question, seen=seen, choice=choice)
    found = _largest(rows, "rollout_corr/kl_fresh")
    differs = found is not None and found > SAME_ARITHMETIC
    if differs:
        seen += f"; KL of fresh tokens at most {found:.2g} nats"
    choice = "yes: bound their age, and decoupled PPO"
    wanted: tuple[str, ...] = ()
    if objective.surrogate not in ("decoupled", "a3po", "m2po"):
        wanted = (
            'trainer.objective.surrogate = "decoupled"',
            # Its weights are ratios to the engine, so no others may apply.
            'trainer.correction.preset = "disabled"',
        )
    if differs and config.cluster is not None:
        choice += "; slime keeps no earlier weights, so its one ratio corrects the engine as well"
    elif differs:
        choice += " with token weights (TIS) of their own for the engine"
        if objective.surrogate not in ("a3po", "m2po") and objective.engine_cap is None:
            wanted = (*wanted, f"trainer.objective.engine_cap = {ENGINE_CAP}")
    return Advice(question=question, seen=seen, choice=choice, set_these=wanted)


def _bound(trainer: TrainerConfig) -> str:
    """How old samples may be, and by which setting."""
    if trainer.schedule == "async":
        return f"trainer.max_staleness is {trainer.max_staleness}"
    return f"trainer.schedule {trainer.schedule} allows {trainer.staleness_bound}"


def _on_schedule(trainer: TrainerConfig, rows: Sequence[Mapping[str, Any]]) -> Iterator[Advice]:
    """Where older samples train: whether generation is limited, as the source wants beside any
    correction.
    """
    if not _largest(rows, "staleness_max"):
        return
    question = "Is generation kept from running ahead?"
    seen = f"trainer.schedule is {trainer.schedule}; {_bound(trainer)}"
    if trainer.schedule != "async":
        lower = trainer.staleness_bound > MOST_AHEAD
        yield Advice(
            question=question,
            seen=seen,
            choice=f"it is, but further than the {MOST_AHEAD} versions that still train as well"
            if lower
            else "it is: rate-limiting",
            set_these=(f"trainer.steps_off = {VERSIONS_AHEAD}",) if lower else (),
        )
        return
    ahead = min(VERSIONS_AHEAD, trainer.max_staleness)
    settable = trainer.objective.outcome_reward is None and ahead > 0
    yield Advice(
        question=question,
        seen=seen,
        choice="it is not: rate-limiting, so that requests wait and no sample is made to expire"
        if settable
        else "it is not, and it cannot be while turns wait for outcomes: bound their age alone",
        set_these=('trainer.schedule = "step_off"', f"trainer.steps_off = {ahead}")
        if settable
        else (),
    )


def _on_experts(config: RunConfig, *, is_mixture: bool) -> Advice:
    question = "Is the model a mixture of experts?"
    if not is_mixture:
        return Advice(question=question, seen="no", choice="no replay of routing")
    passes = config.trainer.epochs_per_batch
    replay = replay_for(passes)
    stored = config.engine_client.routed_experts_topk
    return Advice(
        question=question,
        seen=f"yes; {passes} passes over a batch; routing of {stored or 'no'} experts is stored",
        choice=f"replay of routing: {replay}" + ("" if replay == "none" else ", and clipping"),
        set_these=("engine_client.routed_experts_topk = 8",)
        if replay == "R3" and not stored
        else (),
    )


def _on_tools(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Iterator[Advice]:
    share = _largest(rows, "rollout_corr/post_tool/token_fraction")
    if not share:
        return
    behind, others = (_mean(rows, f"rollout_corr/{part}/std") for part in ("post_tool", "other"))
    if behind is None or others is None:
        return
    spreads = behind > TOOL_SPREAD * others and behind > SAME_ARITHMETIC
    yield Advice(
        question="Do tokens after tool output need more?",
        seen=f"ratios spread by {behind:.2g} there, by {others:.2g} elsewhere",
        choice="they do: expect more clipping there, and look at these turns first"
        if spreads
        else "no: masking tool output, as always, is enough",
        set_these=("trainer.correction.post_tool_upper = 1.5",)
        if spreads and _may_bound_tools(config.trainer)
        else (),
    )


def _may_bound_tools(trainer: TrainerConfig) -> bool:
    """Whether weights apply that have no lower cap after tool output yet."""
    settings = trainer.correction.settings()
    return (
        settings.importance_level is not None
        and MODES[settings.mode].applies_weights
        and settings.post_tool_upper is None
        and trainer.correction.preset is None
        and not settings.is_mask_mode
        and settings.importance_upper >= 1.5
    )


def _on_health(rows: Sequence[Mapping[str, Any]]) -> Iterator[Advice]:
    counts: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for row in rows:
        for line in health_warnings(row):
            metric = line.removeprefix("rollout_corr/").split(" = ", 1)[0]
            counts[metric] += 1
            newest[metric] = line
    for metric, times in counts.most_common():
        yield Advice(
            question=f"Why is {metric} out of its bounds?",
            seen=f"{newest[metric]} ({times} of {len(rows)} steps)",
            choice=_REMEDIES[metric],
        )


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((abs(value) for value in _values(rows, name)), default=None)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None


def as_text(found: Sequence[Advice]) -> str:
    """For a terminal."""
    return "\n\n".join(
        "\n".join(
            (
                one.question,
                f"  seen:   {one.seen}",
                f"  choice: {one.choice}",
                *(f"  set:    {line}" for line in one.set_these),
            )
        )
        for one in found
    )


def as_json(found: Sequence[Advice]) -> str:
    """The same for programs."""
    return json.dumps([asdict(one) for one in found], indent=1)
