"""Settings of the replay of recorded sessions."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from opd.replay.modes import ReplayMode
from trainer.config import TrainerConfig


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
    """`resample`: how many updates sampling may run ahead of training; at most
    `trainer.max_staleness`.
    """
    hard_samples: int = Field(default=1, ge=1)
    """`resample`: most answers to one prompt. A prompt of a task that the recorded sessions mostly
    failed is answered more often (ALGORITHMS 8.4).
    """

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.hard_samples > 1 and self.mode != "resample":
            raise ValueError("hard_samples needs mode = resample: nothing else samples")
        return self


def check_resampling(replay: ReplayConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for a training that does not fit `resample`."""
    if replay.mode != "resample":
        return
    if trainer.objective.outcome_reward is not None:
        raise ValueError(
            "replay.mode = resample answers again, but a recording's outcome is of its own "
            "answers: set trainer.objective.reward_outcome = none, or replay.mode = rescore"
        )
    if trainer.schedule != "async":
        raise ValueError(
            f"trainer.schedule = {trainer.schedule} holds requests of agents, and in replay.mode = "
            "resample there are none: set trainer.schedule = async, and limit sampling with "
            "replay.staleness_eta"
        )
    if replay.staleness_eta > trainer.max_staleness:
        raise ValueError(
            f"replay.staleness_eta = {replay.staleness_eta} samples further ahead than "
            f"trainer.max_staleness = {trainer.max_staleness} lets train: set staleness_eta to at "
            "most that"
        )
