"""Settings of the guard: which canaries there are, and what a version may lose."""

from __future__ import annotations

from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
)


class GuardConfig(BaseModel):
    """Without canaries nothing is checked. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canaries: Path | None = None
    """A file with a canary a line (docs/guard.md): a request, and what its answer must be."""
    samples: PositiveInt = 4
    """Answers to each canary at each version, at temperature 1."""
    start_samples: PositiveInt = 16
    """Answers of the start model to each, which later versions are held against."""
    max_new_tokens: PositiveInt = 128
    """Longest answer."""
    least_passed: float = Field(default=0.9, ge=0, le=1)
    """A version must pass this share of what the start model passed; it fails when the upper bound
    of its 95% interval is below.
    """
    max_kl: NonNegativeFloat = 1.0
    """Nats per token that answers may be from the start model, on average."""
    max_longer: float = Field(default=3.0, gt=1)
    """Answers may be so many times as long as the start's, or as short."""
    least_entropy: float = Field(default=0.1, ge=0, le=1)
    """Share of the start's surprise per token that must be left."""
    max_repeated: float = Field(default=0.3, ge=0, le=1)
    """Share of repeated sequences of four tokens that may come on top of the start's."""
    check_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time that a function of the user may take for one answer."""

    @field_validator("canaries")
    @classmethod
    def _from_anywhere(cls, value: Path | None) -> Path | None:
        """A run that goes on from another folder finds it, too."""
        return None if value is None else value.resolve()

    @property
    def is_on(self) -> bool:
        """Whether versions are checked."""
        return self.canaries is not None
