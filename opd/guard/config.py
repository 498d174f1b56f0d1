"""Settings of the guard: the canaries, and what a version may lose."""

from __future__ import annotations

from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)


class GuardConfig(BaseModel):
    """Without canaries nothing is checked. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canaries: Path | None = None
    """A file with a canary per line (docs/guard.md): a request, and what its answer must be."""
    samples: PositiveInt = 4
    """Answers to each canary and recorded request at each version, at temperature 1."""
    states: NonNegativeInt = 0
    """Recorded requests, the newest of users who consent to training, that each version and the
    start model answer besides: their answers must keep to the limits on drift, too.
    """
    start_samples: PositiveInt = 16
    """Answers of the start model to each, with which later versions are compared."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of an answer."""
    least_passed: float = Field(default=0.9, ge=0, le=1)
    """A version must pass this share of what the start model passed; it fails if the upper bound of
    its 95% interval is lower.
    """
    max_kl: NonNegativeFloat = 1.0
    """How far answers may be from the start model, in nats per token, on average."""
    max_kl_last: NonNegativeFloat = 0.3
    """How far the answers of the version that passed last may be from a version, in nats per token,
    on average: a jump within one step.
    """
    gap_turns: NonNegativeInt = 8
    """Turns, the newest that trained under a hint, that each version and the start model answer
    besides: their gap to the start model under the hint is to fall, not to grow. 0: it is not
    measured.
    """
    max_gap_rise: NonNegativeFloat = 0.5
    """How much larger the gap at these turns may be than the start model's own, in nats per token.
    A version fails if the lower bound of its 95% interval is above that.
    """
    max_longer: float = Field(default=3.0, gt=1)
    """Answers may be up to this many times as long as the start's, or as short."""
    least_entropy: float = Field(default=0.1, ge=0, le=1)
    """Share of the start's surprise per token that must remain in answers to canaries. A version
    fails if the upper bound of its 95% interval is lower.
    """
    max_repeated: float = Field(default=0.3, ge=0, le=1)
    """Share of repeated sequences of four tokens that is allowed on top of the start's."""
    check_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time that a user's function, or a regular expression, may take for one answer."""

    @field_validator("canaries")
    @classmethod
    def _from_anywhere(cls, value: Path | None) -> Path | None:
        """A run that is resumed from another folder finds it too."""
        return None if value is None else value.resolve()

    @model_validator(mode="after")
    def _has_canaries(self) -> GuardConfig:
        if self.states and self.canaries is None:
            raise ValueError("guard.states needs guard.canaries: a file with at least one canary")
        return self

    @property
    def is_on(self) -> bool:
        """Whether versions are checked."""
        return self.canaries is not None
