"""Settings of the tool lab itself; its processes read the run's own configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from examples.tool_lab.preferences import TRAINABLE_KINDS, TRAINED_KINDS
from trainer.config import Schedule

HintMode = Literal["judge", "none", "off-topic", "contrary"]


def _trainable(kind: str) -> str:
    if kind not in TRAINABLE_KINDS:
        raise ValueError(f"choose some of {', '.join(TRAINABLE_KINDS)}")
    return kind


PreferenceKind = Annotated[str, AfterValidator(_trainable)]


class LabConfig(BaseModel):
    """How long the lab learns, how many users talk at once, and what the teacher gets to see."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preferences: tuple[PreferenceKind, ...] = Field(default=TRAINED_KINDS, min_length=1)
    """What the users silently want, and what is measured as success."""
    open_users: float = Field(default=0.0, ge=0, le=1)
    """Share of users who have no silent wishes and openly ask for what the others do not want.
    Without rehearsal, they keep the policy following instructions while it learns.
    """
    rehearsal: bool = True
    """Learn like `serve` (`opd.run.recipe`); otherwise, only from the users' own turns."""
    updates: int = Field(default=12, ge=0)
    """Steps after which learning ends; steps that a control makes the trainer skip count too."""
    max_seconds: float = Field(default=300.0, gt=0)
    """Learning ends after this time even with fewer updates; the summary tells which it was."""
    sessions_in_flight: int = Field(default=24, ge=1)
    """Conversations that run at the same time."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds between an agent's answer and its next request: what thinking and tools take."""
    staleness_eta: int = Field(default=2, ge=0)
    """Batches that generation may run ahead of training (ALGORITHMS 6.2)."""
    eval_samples: int = Field(default=512, ge=1)
    """Responses sampled for each preference and each other skill, before and after."""
    schedule: Schedule = "async"
    """When conversations wait for training; the run's `trainer.schedule`."""
    hints: HintMode = "judge"
    """What the teacher sees: the judge's hint, or one of the controls that must not teach."""
    seed: int = 0
    """Seed of the users, of their words, and of the trainer."""

    @property
    def rehearses(self) -> bool:
        """Whether hints are practised. With a control they are not: its hint is shown only to the
        teacher of the turn, and the judge's hint would be practised.
        """
        return self.rehearsal and self.hints == "judge"
