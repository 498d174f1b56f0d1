"""What every objective's options say about it. It imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Need: TypeAlias = Literal[
    "teacher_scalar", "teacher_topk", "teacher_tokens", "teacher_in_trainer", "reward"
]
SupportKind: TypeAlias = Literal["none", "student", "teacher", "overlap", "samples"]
OutcomePart: TypeAlias = Literal["only", "add"]
"""How much of a reward is the session's outcome: all, or a part along with the judge's reward."""
SCALAR: frozenset[Need] = frozenset({"teacher_scalar"})


class Options(BaseModel):
    """The base of every objective's options: the defaults of what they say about it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of an added PPO term on rewards; above 0 the run needs `judge.reward`."""

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
        """Whose tokens are used in addition to the sampled one."""
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
    def compares_prompts(self) -> bool:
        """Whether earlier answers to a turn's prompt count."""
        return False

    @property
    def outcome_reward(self) -> OutcomePart | None:
        """How rewards are made from session outcomes; None: they are not."""
        return None

    @property
    def compares_sessions(self) -> bool:
        """Whether sessions that began with the same prompt are compared."""
        return False

    @property
    def values_turns(self) -> bool:
        """Whether the worth of a session's turns counts."""
        return False

    @property
    def charges_kl(self) -> bool:
        """Whether a reward is charged for the distance from the frozen start."""
        return False

    @property
    def needs_sampling_weights(self) -> bool:
        """Whether a turn is scored by the weights that sampled it."""
        return False

    @property
    def needs_first_answers(self) -> bool:
        """Whether the first answers to a turn's prompt count, however old."""
        return False

    @property
    def needs_batch_statistics(self) -> bool:
        """Whether figures of the whole batch are needed before the step."""
        return False

    @property
    def compares_topk(self) -> bool:
        """Whether the student's own top-k is reported along with the teacher's."""
        return False

    @property
    def chooses_hints(self) -> bool:
        """Whether several hint candidates are scored and one is chosen."""
        return False


class TeacherReach(Options):
    """For objectives on sampled tokens: where the teacher acts, and where a reward does (7.2)."""

    mix: Literal["sum", "replace"] = "sum"
    """Let both act, or only the teacher on eligible turns and only the reward on others (ALGORITHMS
    7.2). With `pass_rate_threshold`, the teacher acts on eligible turns alone either way.
    """
    pass_rate_threshold: float | None = Field(default=None, ge=0, le=1)
    """The teacher acts on failed answers to prompts that pass at most this often, and on no others.
    Required with `mix = replace`; with `sum`, rewards act on these answers as well.
    """
    horizon: PositiveInt | None = None
    """The teacher acts on the first tokens of a response only."""
    zero_cut_answers: bool = False
    """An answer that was cut off at its token limit teaches nothing: neither teacher nor reward."""

    @property
    def compares_rewards(self) -> bool:
        """For a pass rate."""
        return self.pass_rate_threshold is not None

    @property
    def compares_prompts(self) -> bool:
        """For a pass rate."""
        return self.pass_rate_threshold is not None

    @model_validator(mode="after")
    def _check_reach(self) -> TeacherReach:
        if self.mix == "replace" and (self.pass_rate_threshold is None or self.reward_coef == 0):
            raise ValueError("mix = replace needs pass_rate_threshold and reward_coef above 0")
        if self.pass_rate_threshold is not None and self.reward_coef == 0:
            raise ValueError("pass_rate_threshold goes by rewards: set reward_coef above 0")
        return self
