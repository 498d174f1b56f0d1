"""The objectives by name, with what each needs and which metrics each must report.

An objective is a pure function of `TokenBatch` and its settings. A need that nothing provides is
refused by name at start; a metric that an objective promises and does not report stops training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainer.errors import ObjectiveNeedsError
from trainer.objectives.opd import ObjectiveResult, OpdSettings, TokenBatch, hindsight_opd_loss

Need: TypeAlias = Literal["teacher_scalar"]
LossFunction: TypeAlias = Callable[[TokenBatch, OpdSettings, int | None], ObjectiveResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`reduced_keys(settings)` names every reduced metric that `loss` reports."""

    name: str
    needs: frozenset[Need]
    loss: LossFunction
    reduced_keys: Callable[[OpdSettings], frozenset[str]]


def _opd_keys(settings: OpdSettings) -> frozenset[str]:
    keys = {
        "loss",
        "pg_loss",
        "entropy_loss",
        "pg_clipfrac",
        "pg_clipfrac_lower",
        "ppo_kl",
        "train_rollout_logprob_abs_diff",
        "rollout_comparable_frac",
    }
    if settings.beta_kl > 0:
        keys |= {"kl_loss", "kl/clamped_frac"}
    if settings.tis_cap is not None:
        keys |= {"tis", "tis_clipfrac", "tis_abs"}
    return frozenset(keys)


OBJECTIVES: dict[str, Objective] = {
    "hindsight_opd": Objective(
        name="hindsight_opd",
        needs=frozenset({"teacher_scalar"}),
        loss=hindsight_opd_loss,
        reduced_keys=_opd_keys,
    )
}


def select_objective(name: str, provided: frozenset[Need]) -> Objective:
    """The objective `name`; ValueError if unknown, ObjectiveNeedsError if a need is unmet."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {sorted(OBJECTIVES)}")
    objective = OBJECTIVES[name]
    missing = objective.needs - provided
    if missing:
        raise ObjectiveNeedsError(
            f"objective {name!r} needs {sorted(missing)}, which nothing in this run provides"
        )
    return objective
