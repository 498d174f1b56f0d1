"""What the run's objective needs of a turn, for code that does not know the objective itself.

The launch writes it next to `hindsight_config` (trainer.slime.plan.sample_needs), and turns that
lack something are dropped when they are leased: a row that cannot train must not reach the trainer.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from records.names import DropReason, SideSource
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeReward, OutcomeRewards
from records.types import ReadySample


class SampleNeeds(BaseModel):
    """Needs of an objective whose teacher is an engine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    teacher: bool
    """The teacher's log-probs of the response."""
    reward: bool
    """The reward is used: it can stand in for the teacher, or is all there is."""
    compared: bool
    """A reward's advantage depends on more than the reward, so that a reward of 0 can teach."""
    top_k: int = Field(ge=0)
    """How many of the teacher's likeliest tokens are needed at each position."""
    side_source: SideSource | None = Field(default=None, strict=False)
    """Where the side samples come from that are needed; unset: none are."""
    side_samples: int = Field(default=0, ge=0)
    """With `side_source`: how many at each position."""
    past_versions: int | None = Field(default=None, ge=0)
    """Earlier answers to its prompt, from at most this many versions before; unset: none."""
    first_answers: bool = False
    """With `past_versions`: also the first answers to its prompt."""
    compares_sessions: bool = False
    """With `past_versions`: also earlier sessions that began like its own."""
    values_turns: bool = False
    """With `past_versions`: also what turns were worth, of its session and of these."""
    outcome_reward: OutcomeReward | None = None
    """How rewards are made from sessions' outcomes; unset: they are not."""
    outcome_wait_s: float = Field(default=0.0, ge=0)
    """With `outcome_reward`: how long a turn waits for it."""

    @property
    def history(self) -> HistoryWindow | None:
        """What to read of a prompt's earlier answers; None: nothing."""
        if self.past_versions is None:
            return None
        return HistoryWindow(
            versions=self.past_versions,
            first=self.first_answers,
            sessions=self.compares_sessions,
            outcomes=self.outcome_reward is not None,
            values=self.values_turns,
        )

    @property
    def outcomes(self) -> OutcomeRewards | None:
        """How rewards are made from outcomes; None: they are not."""
        if self.outcome_reward is None:
            return None
        return OutcomeRewards(
            kind=self.outcome_reward, wait_s=self.outcome_wait_s, hints_train=self.teacher
        )

    def lacking(self, sample: ReadySample) -> DropReason | None:
        """Why a sample cannot train; None if it can."""
        if not self.teacher or not np.isfinite(sample.teacher_logprobs).all():
            if not self.reward or sample.reward is None:
                return DropReason.TEACHER_LOGPROBS_INVALID if self.teacher else DropReason.NO_HINT
            is_neutral = sample.reward == 0 and not self.compared
            return DropReason.NEUTRAL_REWARD if is_neutral else None
        ids = sample.teachings[0].topk_ids if sample.teachings else None
        if self.top_k > 0 and (ids is None or ids.shape[-1] < self.top_k):
            return DropReason.TEACHER_LOGPROBS_INVALID
        return self._lacking_side(sample)

    def _lacking_side(self, sample: ReadySample) -> DropReason | None:
        """Why its side samples cannot train: they were made when it was scored, and only the
        weights of then could make them.
        """
        if self.side_source is None:
            return None
        side = sample.side_samples
        if side is None or side.source is not self.side_source:
            return DropReason.SAMPLING_WEIGHTS_GONE
        if side.ids.shape[-1] != self.side_samples:
            return DropReason.SAMPLING_WEIGHTS_GONE
        if not np.isfinite(side.teacher_logprobs).all():
            return DropReason.TEACHER_LOGPROBS_INVALID
        return None
