"""What the trainer's settings mean together: combinations that are refused, or worth a warning. It
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.objectives.option_base import TeacherReach
from trainer.objectives.options import HindsightOpd, SelfDistillation, SideSampleOptions

if TYPE_CHECKING:
    from trainer.config import TrainerConfig


def check_schedule(config: TrainerConfig) -> None:
    """Raise ValueError for a schedule and a staleness that contradict each other."""
    if (config.schedule == "step_off") != (config.steps_off is not None):
        raise ValueError("schedule step_off and steps_off belong together: set both, or neither")
    if config.steps_off is not None and config.steps_off > config.max_staleness:
        raise ValueError(
            f"steps_off {config.steps_off} lets samples be older than max_staleness "
            f"{config.max_staleness}: set max_staleness to at least as much"
        )


def check_combination(config: TrainerConfig) -> None:
    """Raise ValueError for settings that are valid alone but wrong together."""
    is_normed = config.aggregation == "seq-mean-token-sum-norm"
    if is_normed != (config.aggregation_horizon is not None):
        raise ValueError(
            "aggregation seq-mean-token-sum-norm and aggregation_horizon belong together: set both"
        )
    objective, correction = config.objective, config.correction.settings()
    if not isinstance(objective, HindsightOpd):
        if correction.mode != "decoupled":
            raise ValueError(
                f"correction.mode {correction.mode} belongs to objective hindsight_opd; "
                f"{objective.name} has no clipped ratio to change, use decoupled"
            )
        return
    if (objective.surrogate == "pure_is") != (correction.mode == "pure_is"):
        raise ValueError(
            "objective.surrogate pure_is and correction.mode pure_is belong together: set both"
        )
    if objective.surrogate == "m2po" and correction.mode != "bypass":
        raise ValueError(
            "surrogate m2po clips the ratio to the rollout engine: set correction.mode = bypass"
        )
    own_weights = objective.surrogate in ("decoupled", "a3po")
    if own_weights and (correction.importance_level is not None or correction.mode != "decoupled"):
        raise ValueError(
            f"surrogate {objective.surrogate} weighs by the rollout engine's log-probs itself: "
            "set correction.importance_level = none and correction.mode = decoupled"
        )
    if objective.normalise and objective.advantage_reference == "current":
        raise ValueError("normalise needs advantage_reference = old: statistics come before a step")
    if (
        correction.batch_normalize
        and correction.mode != "decoupled"
        and config.epochs_per_batch > 1
    ):
        raise ValueError("correction.batch_normalize needs epochs_per_batch = 1 in this mode")


def leaves_stale_uncorrected(config: TrainerConfig) -> bool:
    """Whether samples of older weights train without anything that corrects for their age."""
    objective, correction = config.objective, config.correction.settings()
    if not isinstance(objective, HindsightOpd):
        return False
    weighs_itself = objective.surrogate in ("decoupled", "a3po")
    is_plain = correction.importance_level is None and correction.mode == "decoupled"
    return is_plain and not weighs_itself


def repeats_problem(config: TrainerConfig) -> str | None:
    """None, or in one line why these settings cannot train a turn again, and what to set instead:
    the loss must weigh a turn by the ratio of the policy to the weights that sampled it.
    """
    objective = config.objective
    if isinstance(objective, SideSampleOptions):
        weighs, remedy = objective.has_ratio, "set direction = reverse and importance = true"
    elif isinstance(objective, HindsightOpd):
        weighs = not leaves_stale_uncorrected(config)
        remedy = "set correction.importance_level, or a surrogate that weighs them"
    elif isinstance(objective, SelfDistillation):
        weighs = config.correction.settings().importance_level is not None
        remedy = "set correction.importance_level"
    else:
        weighs, remedy = False, "choose hindsight_opd, self_distillation or side_samples"
    if weighs:
        return None
    return (
        "replay_times above 1 trains turns on weights that did not sample them, and objective "
        f"{objective.name} as it is set does not correct for that: {remedy}, or replay_times = 1"
    )


def lessons_problem(config: TrainerConfig) -> str | None:
    """None, or in one line why these settings cannot train lessons, and what to set instead."""
    if config.replay_times > 1:
        return (
            "replay_times trains the same answers again, but rehearsal samples new ones: set "
            "replay_times = 1, or rehearsal.enabled = false"
        )
    if "teacher_scalar" not in config.objective.needs:
        return (
            f"objective {config.objective.name!r} learns from rewards alone, but lessons have a "
            "teacher and no reward: choose another, or set rehearsal.enabled = false"
        )
    objective = config.objective
    if isinstance(objective, TeacherReach) and objective.pass_rate_threshold is not None:
        is_replaced = objective.mix == "replace"
        name = "mix = replace" if is_replaced else "pass_rate_threshold"
        remedy = "set mix = sum without pass_rate_threshold" if is_replaced else "unset it"
        return (
            f"objective.{name} lets a teacher act on failed answers only, but lessons have no "
            f"reward: {remedy}, or rehearsal.enabled = false"
        )
    if config.side_source is not None:
        return (
            "side samples are drawn for turns only: choose another objective, or set "
            "rehearsal.enabled = false"
        )
    if config.teacher.kind not in ("engine", "frozen"):
        return (
            f"teacher.kind {config.teacher.kind!r} follows the policy, but counter- and "
            "keep-lessons hold it to the start: set engine or frozen, or rehearsal.enabled = false"
        )
    return None
