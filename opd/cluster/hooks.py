"""The flags that put this project's functions into slime, and what they cannot do there."""

from __future__ import annotations

from opd.cluster.architecture import Flag
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.slime.plan import loss_flags, rate_flags, slime_supports

ROLLOUT = "rollout_bridge.slime.rollout"


def check_objective(trainer: TrainerConfig) -> None:
    """Raise ConfigError for an objective or a correction that slime cannot train."""
    reason = slime_supports(trainer)
    if reason is not None:
        raise ConfigError(reason)


def rollout_flags() -> list[Flag]:
    """Where slime gets its samples: from the store, by four functions."""
    return [
        ("--rollout-function-path", f"{ROLLOUT}.generate_rollout"),
        ("--data-source-path", f"{ROLLOUT}.HindsightDataSource"),
        ("--custom-convert-samples-to-train-data-path", f"{ROLLOUT}.convert_samples"),
        ("--custom-rollout-log-function-path", f"{ROLLOUT}.log_rollout"),
    ]


def hook_flags(trainer: TrainerConfig, *, rehearses: bool) -> list[Flag]:
    """Advantages, loss and correction; the rate, if hints are practised."""
    return [*loss_flags(trainer), *(rate_flags() if rehearses else [])]


def hook_paths(flags: list[Flag]) -> list[str]:
    """The dotted paths of functions and classes among the flags."""
    return [
        flag[1]
        for flag in flags
        if len(flag) == 2 and flag[0].endswith("-path") and _is_dotted(flag[1])
    ]


def _is_dotted(value: str) -> bool:
    return "/" not in value and "." in value
