"""The configuration of rollout correction: how samples from other weights, or from another engine's
arithmetic, are corrected. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
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

from trainer.objectives.rollout_correction.presets import preset
from trainer.objectives.rollout_correction.settings import (
    RolloutCorrectionSettings,
    rejection_rule,
)
from trainer.objectives.rollout_correction.verl_names import Semantics, settings_from_verl


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
