"""How a configuration names the settings of rollout correction: field by field, as a preset, or by
verl's options. It imports no torch.

Presets are those of the rollout correction page and of verl 0.9.1 (ALGORITHMS 4.5); `preset`
changes thresholds of one, never its structure.

verl's names (4.3, 9 item 9) are aliases. For `settings_from_verl` they mean by default what the
page says: bounds are on r = trainer over rollout, and sums are clamped, not their terms.
`semantics="verl"` means what verl 0.9.1 computes: bounds of k1 are on 1/r, and terms are clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from trainer.objectives.names import unknown_name
from trainer.objectives.rollout_correction.settings import (
    STATISTIC_ALIASES,
    Level,
    Mode,
    RejectionRule,
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


class RejectionConfig(BaseModel):
    """One rule that takes tokens or turns out of the loss (ALGORITHMS 4.3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    statistic: str
    """token, sequence, geometric, or token_k1, seq_mean_k3 and so on."""
    upper: float | None = None
    """Largest value that stays; required. For k1 it bounds the ratio itself."""
    lower: float | None = None
    """Smallest ratio that stays; unset is 1/upper. For k1 only."""


BESIDE_PRESET = frozenset({"importance_upper", "importance_lower", "veto_threshold"})
"""What may be set together with a preset of rollout correction."""


class CorrectionConfig(BaseModel):
    """Rollout correction: weights, rejection, veto (ALGORITHMS 4). A turn is a sequence."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    preset: str | None = None
    """A named setting (docs/objectives.md); then only thresholds may be set with it."""
    verl: dict[str, Any] | None = None
    """Options by verl's names (rollout_is, rollout_rs, ...), as in its configuration; then only
    their meaning (`verl_semantics`) may be set with them.
    """
    verl_semantics: Semantics = "verl"
    """What these options mean: as verl 0.9.1 computes it, or as the page on rollout correction
    says.
    """
    mode: Literal["decoupled", "bypass", "pure_is"] = "decoupled"
    """Which policies are compared, and whether weights are applied."""
    importance_level: Literal["token", "sequence", "none"] = "token"
    """Weights per token or per turn; none applies no weights."""
    importance_upper: PositiveFloat = 2.0
    """Cap of a weight."""
    importance_lower: float | None = Field(default=None, ge=0)
    """If set, weights outside both bounds become 0 instead of being capped (IcePop)."""
    post_tool_upper: PositiveFloat | None = None
    """If set, the cap of weights of answers to a tool result, at most `importance_upper`: ratios
    run away there first (ALGORITHMS 6.8).
    """
    is_mask_mode: bool = False
    """Leave weights above the cap as they are, for use with rejection."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejections: list[RejectionConfig] = Field(default_factory=list)
    """A token stays only if every rule keeps it."""
    veto_threshold: float | None = None
    """A turn with any token whose ratio is below this is rejected."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        self.settings()
        return self

    def settings(self) -> RolloutCorrectionSettings:
        """As the pure functions take them; raises ValueError for settings that make no sense."""
        if self.preset is not None:
            return self._preset_settings(self.preset)
        if self.verl is not None:
            return self._verl_settings(self.verl)
        if "verl_semantics" in self.model_fields_set:
            raise ValueError("verl_semantics says what options by verl's names mean: set verl, too")
        if self.importance_level == "none" and (
            self.batch_normalize
            or self.is_mask_mode
            or self.importance_lower is not None
            or self.post_tool_upper is not None
        ):
            raise ValueError(
                "importance_level none applies no weights: unset batch_normalize, is_mask_mode, "
                "importance_lower and post_tool_upper, or set importance_level"
            )
        return RolloutCorrectionSettings(
            mode=self.mode,
            importance_level=None if self.importance_level == "none" else self.importance_level,
            importance_upper=self.importance_upper,
            importance_lower=self.importance_lower,
            post_tool_upper=self.post_tool_upper,
            is_mask_mode=self.is_mask_mode,
            batch_normalize=self.batch_normalize,
            rejections=tuple(
                rejection_rule(rule.statistic, rule.upper, rule.lower) for rule in self.rejections
            ),
            veto_threshold=self.veto_threshold,
        )

    def _preset_settings(self, name: str) -> RolloutCorrectionSettings:
        others = self.model_fields_set - BESIDE_PRESET - {"preset"}
        if others:
            listed = ", ".join(sorted(others))
            raise ValueError(f"preset {name!r} and {listed} are both set: choose one")
        given = "importance_upper" in self.model_fields_set
        return preset(
            name,
            is_threshold=self.importance_upper if given else None,
            is_threshold_lower=self.importance_lower,
            veto_threshold=self.veto_threshold,
        )

    def _verl_settings(self, options: Mapping[str, Any]) -> RolloutCorrectionSettings:
        others = self.model_fields_set - {"verl", "verl_semantics"}
        if others:
            raise ValueError(f"verl and {', '.join(sorted(others))} are both set: choose one")
        return settings_from_verl(options, semantics=self.verl_semantics)

    @model_serializer(mode="wrap")
    def _as_it_was_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A preset, or verl's options, only with what was set along with it: with the rest it could
        not be read again.
        """
        values = handler(self)
        if self.preset is not None:
            kept = {"preset"} | (self.model_fields_set & BESIDE_PRESET)
        elif self.verl is not None:
            kept = {"verl", "verl_semantics"}
        else:
            kept = values.keys() - {"verl_semantics"}
        return {key: value for key, value in values.items() if key in kept}
