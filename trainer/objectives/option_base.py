"""What every objective's options say of it. It imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Need: TypeAlias = Literal["teacher_scalar", "teacher_topk", "teacher_in_trainer", "reward"]
SupportKind: TypeAlias = Literal["none", "student", "teacher", "overlap", "samples"]
SCALAR: frozenset[Need] = frozenset({"teacher_scalar"})


class Options(BaseModel):
    """Of no objective yet: the defaults of what the others say of themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of a PPO term on rewards beside it; above 0 the run needs `judge.reward`."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the run must provide: the teacher's part, and rewards if they are weighted."""
        rewards: frozenset[Need] = frozenset({"reward"} if self.reward_coef > 0 else ())
        return self.teacher_needs | rewards

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """What the teacher must give: its log-probs of the sampled tokens."""
        return SCALAR

    @property
    def kd_coef(self) -> float:
        """What the teacher's part of the loss is multiplied by."""
        return 1.0

    @property
    def support(self) -> SupportKind:
        """Whose tokens are looked at beside the sampled one."""
        return "none"

    @property
    def support_size(self) -> int:
        """Tokens per position in the support; 0 without one."""
        return 0

    @property
    def is_policy_gradient(self) -> bool:
        """Whether the loss is a ratio times a detached advantage of the sampled token."""
        return False

    @property
    def compares_rewards(self) -> bool:
        """Whether a reward's advantage depends on more than the reward, so that 0 can teach."""
        return False

    @property
    def needs_batch_statistics(self) -> bool:
        """Whether figures of the whole batch are needed before the step."""
        return False

    @property
    def compares_topk(self) -> bool:
        """Whether the student's own top-k is reported beside the teacher's."""
        return False

    @property
    def chooses_hints(self) -> bool:
        """Whether several hint candidates are scored and one is chosen."""
        return False
