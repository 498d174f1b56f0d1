"""What every objective's options say of it. It imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Need: TypeAlias = Literal["teacher_scalar", "teacher_topk", "teacher_in_trainer", "reward"]
SupportKind: TypeAlias = Literal["none", "student", "teacher", "overlap", "samples"]
SCALAR: frozenset[Need] = frozenset({"teacher_scalar"})


class Options(BaseModel):
    """Of no objective yet: the defaults of what the others say of themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @property
    def needs(self) -> frozenset[Need]:
        """What the run must provide."""
        return SCALAR

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
