"""Settings from verl's option names: those of the rollout correction page and of verl 0.9.1.

Facts: ALGORITHMS 4.3, 4.5 and 9 item 9. The names are aliases; by default they mean what the page
says: bounds are on r = trainer over rollout, and sums are clamped, not their terms. `semantics=
"verl"` means what verl 0.9.1 computes: bounds of k1 are on 1/r, and terms are clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainer.objectives.rollout_correction.nearest import unknown_name
from trainer.objectives.rollout_correction.settings import (
    STATISTIC_ALIASES,
    Mode,
    RejectionRule,
    RolloutCorrectionSettings,
    rejection_rule,
)

Semantics = Literal["page", "verl"]
VERL_OPTIONS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_mode",
    "loss_type",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
)
_LOSS_MODES: Mapping[str, Mode] = {"ppo_clip": "bypass", "reinforce": "pure_is"}


def settings_from_verl(
    options: Mapping[str, Any], *, semantics: Semantics = "page"
) -> RolloutCorrectionSettings:
    """Translate options by verl's names; one that is absent is off (`rollout_is` too).

    So is importance sampling with a threshold of None. Raises ValueError for an unknown option,
    with the nearest valid one, and for bad values.
    """
    for name in options:
        if name not in VERL_OPTIONS:
            raise unknown_name("option of rollout correction", name, VERL_OPTIONS)
    if semantics not in ("page", "verl"):
        raise unknown_name("semantics", semantics, ("page", "verl"))
    is_weighted = options.get("rollout_is_threshold", 2.0) is not None
    lower, upper = _bounds(_given(options, "rollout_is_threshold", 2.0), "rollout_is_threshold")
    return RolloutCorrectionSettings(
        mode=_mode(options),
        importance_level=options.get("rollout_is") if is_weighted else None,
        importance_upper=upper,
        importance_lower=lower,
        batch_normalize=bool(options.get("rollout_is_batch_normalize")),
        rejections=_rejections(options, semantics),
        clamp_before_sum=semantics == "verl",
        veto_threshold=options.get("rollout_token_veto_threshold"),
    )


def _given(options: Mapping[str, Any], name: str, default: Any) -> Any:
    value = options.get(name)
    return default if value is None else value


def _mode(options: Mapping[str, Any]) -> Mode:
    pure = bool(options.get("use_pure_rollout_correction"))
    bypass = bool(options.get("bypass_mode") or options.get("bypass_old_logprob_for_rollout"))
    loss_type = _given(options, "loss_type", "ppo_clip")
    if loss_type not in _LOSS_MODES:
        raise unknown_name("loss_type", loss_type, _LOSS_MODES)
    if pure and not bypass:
        raise ValueError(
            "use_pure_rollout_correction needs bypass_old_logprob_for_rollout: set both"
        )
    if not bypass:
        return "decoupled"
    return "pure_is" if pure else _LOSS_MODES[loss_type]


def _rejections(options: Mapping[str, Any], semantics: Semantics) -> tuple[RejectionRule, ...]:
    # A name given twice, also once as an alias, counts once.
    names = dict.fromkeys(
        STATISTIC_ALIASES.get(name, name) for name in _entries(options.get("rollout_rs"))
    )
    thresholds = _entries(options.get("rollout_rs_threshold"))
    if names and not thresholds:
        raise ValueError(f"rollout_rs={','.join(names)} has no rollout_rs_threshold; set one")
    if len(thresholds) == 1:
        thresholds = thresholds * len(names)
    if names and len(thresholds) != len(names):
        raise ValueError(
            f"rollout_rs has {len(names)} options, rollout_rs_threshold {len(thresholds)} entries; "
            "give one entry per option, or one for all"
        )
    default_lower = options.get("rollout_rs_threshold_lower")
    return tuple(
        _rule(name, threshold, default_lower, semantics)
        for name, threshold in zip(names, thresholds, strict=bool(names))
    )


def _rule(
    name: str, threshold: str, default_lower: float | None, semantics: Semantics
) -> RejectionRule:
    lower, upper = _bounds(threshold, "rollout_rs_threshold")
    rule = rejection_rule(name, upper, lower if lower is not None else default_lower)
    if semantics == "page" or not rule.bounds_ratio:
        return rule
    # Bounds on 1/r: [1/upper, 1/lower] on r.
    top = 1.0 / rule.lower if rule.lower else float("inf")
    return RejectionRule(statistic=rule.statistic, lower=1.0 / rule.upper, upper=top)


def _entries(value: Any) -> list[str]:
    if value is None:
        return []
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [text for part in parts if (text := str(part).strip())]


def _bounds(value: Any, name: str) -> tuple[float | None, float]:
    """`2.0` -> (None, 2.0); `"0.5_2.0"` -> (0.5, 2.0)."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return None, numbers[0]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise ValueError(f"{name}: expected a number or 'lower_upper', got {value!r}")
