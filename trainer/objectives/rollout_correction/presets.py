"""Rollout correction by name: the presets of the rollout correction page and of verl 0.9.1.

Facts: ALGORITHMS 4.5. `preset` changes thresholds of one, never its structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.objectives.rollout_correction.nearest import unknown_name
from trainer.objectives.rollout_correction.settings import (
    Level,
    Mode,
    RolloutCorrectionSettings,
    rejection_rule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """`rs_lower` None: the reciprocal of `rs_upper`, or no lower bound where none applies."""

    mode: Mode = "decoupled"
    importance: Level | None = None
    is_upper: float = 2.0
    is_lower: float | None = None
    rejection: str | None = None
    rs_upper: float | None = None
    rs_lower: float | None = None
    veto: float | None = None


def _geometric(mode: Mode = "decoupled", importance: Level | None = None) -> _Preset:
    return _Preset(
        mode=mode, importance=importance, rejection="geometric", rs_upper=1.001, rs_lower=0.999
    )


def _k3(mode: Mode = "decoupled", importance: Level | None = None) -> _Preset:
    return _Preset(mode=mode, importance=importance, rejection="seq_mean_k3", rs_upper=0.01)


_SEQUENCE_BOTH = _Preset(importance="sequence", rejection="sequence", rs_upper=2.0)

_PRESETS: Mapping[str, _Preset] = {
    "disabled": _Preset(),
    # The rollout correction page.
    "token_is": _Preset(importance="token"),
    "token_tis": _Preset(importance="token"),
    "seq_is": _Preset(importance="sequence"),
    "seq_is_rs": _SEQUENCE_BOTH,
    "seq_mis": _Preset(importance="sequence", rejection="sequence", rs_upper=2.0, rs_lower=0.0),
    "geo_rs": _Preset(rejection="geometric", rs_upper=1.001, veto=1e-4),
    "geo_mis": _Preset(rejection="geometric", rs_upper=1.001, rs_lower=0.999, veto=1e-4),
    "ppo_is_bypass": _Preset(mode="bypass", importance="token"),
    "pure_is": _Preset(mode="pure_is", importance="sequence"),
    # verl 0.9.1.
    "decoupled_token_is": _Preset(importance="token"),
    "decoupled_seq_is": _Preset(importance="sequence"),
    "decoupled_token_icepop": _Preset(importance="token", is_upper=5.0, is_lower=0.5),
    "decoupled_seq_is_rs": _SEQUENCE_BOTH,
    "decoupled_geo_rs": _geometric(),
    "decoupled_geo_rs_seq_tis": _geometric(importance="sequence"),
    "decoupled_geo_rs_token_tis": _geometric(importance="token"),
    "decoupled_k3_rs": _k3(),
    "decoupled_k3_rs_seq_tis": _k3(importance="sequence"),
    "decoupled_k3_rs_token_tis": _k3(importance="token"),
    "bypass_ppo_clip": _Preset(mode="bypass"),
    "bypass_ppo_clip_geo_rs": _geometric("bypass"),
    "bypass_ppo_clip_k3_rs": _k3("bypass"),
    "bypass_pg_is": _Preset(mode="pure_is", importance="sequence"),
    "bypass_pg_token_icepop": _Preset(
        mode="pure_is", importance="token", is_upper=5.0, is_lower=0.5
    ),
    "bypass_pg_geo_rs": _geometric("pure_is"),
    "bypass_pg_geo_rs_seq_tis": _geometric("pure_is", "sequence"),
    "bypass_pg_geo_rs_token_tis": _geometric("pure_is", "token"),
}
PRESET_NAMES = tuple(_PRESETS)


def preset(
    name: str,
    *,
    is_threshold: float | None = None,
    is_threshold_lower: float | None = None,
    rs_threshold: float | None = None,
    rs_threshold_lower: float | None = None,
    veto_threshold: float | None = None,
) -> RolloutCorrectionSettings:
    """The settings of a preset, with the thresholds that are given in place of its own.

    A new `rs_threshold` alone also moves the lower bound, to its reciprocal; one of 0 stays 0.
    Raises ValueError for an unknown name and for a threshold that the preset does not use.
    """
    if name not in PRESET_NAMES:
        raise unknown_name("rollout correction preset", name, PRESET_NAMES)
    chosen = _PRESETS[name]
    _check_used(name, chosen, is_threshold, is_threshold_lower, rs_threshold, rs_threshold_lower)
    rejections = ()
    if chosen.rejection is not None:
        lower = chosen.rs_lower if rs_threshold is None or chosen.rs_lower == 0 else None
        lower = rs_threshold_lower if rs_threshold_lower is not None else lower
        upper = rs_threshold if rs_threshold is not None else chosen.rs_upper
        rejections = (rejection_rule(chosen.rejection, upper, lower),)
    return RolloutCorrectionSettings(
        mode=chosen.mode,
        importance_level=chosen.importance,
        importance_upper=is_threshold if is_threshold is not None else chosen.is_upper,
        importance_lower=is_threshold_lower if is_threshold_lower is not None else chosen.is_lower,
        rejections=rejections,
        veto_threshold=veto_threshold if veto_threshold is not None else chosen.veto,
    )


def _check_used(
    name: str,
    chosen: _Preset,
    is_threshold: float | None,
    is_threshold_lower: float | None,
    rs_threshold: float | None,
    rs_threshold_lower: float | None,
) -> None:
    if chosen.importance is None and (is_threshold is not None or is_threshold_lower is not None):
        raise ValueError(f"preset {name!r} has no weights: leave is_threshold out")
    if chosen.rejection is None and (rs_threshold is not None or rs_threshold_lower is not None):
        raise ValueError(f"preset {name!r} rejects nothing by ratio: leave rs_threshold out")
