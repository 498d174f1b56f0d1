"""Settings of the replay of recorded sessions."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opd.replay.modes import ReplayMode


class ReplayConfig(BaseModel):
    """What becomes of recorded turns. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: ReplayMode = "rescore"
    """`rescore`: the recorded response is scored by policy and teacher and trained on as off-policy
    data. `resample`: the policy answers the recorded prompt again, and that is scored and trained
    on. `judge-only`: votes and hints, nothing after that.
    """
    held_out: float = Field(default=0.2, ge=0, lt=1)
    """Share of the recorded sessions that are judged and scored but never trained on: the gap
    between hinted teacher and student is measured there, before and after.
    """
    temperature: float = Field(default=1.0, ge=0)
    """`resample`: sampling temperature."""
    max_new_tokens: int = Field(default=512, ge=1)
    """`resample`: most tokens of a response."""
    staleness_eta: int = Field(default=1, ge=0)
    """`resample`: how many updates sampling may run ahead of training."""
    hard_samples: int = Field(default=1, ge=1)
    """`resample`: most answers to one prompt. A prompt of a task that the recorded sessions mostly
    failed is answered more often (ALGORITHMS 8.4).
    """

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.hard_samples > 1 and self.mode != "resample":
            raise ValueError("hard_samples needs mode = resample: nothing else samples")
        return self
