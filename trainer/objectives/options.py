"""The options of every objective, by name; what each needs from the run, and what it refuses.

It imports no torch, because the configuration is read before any model is loaded. The formulas are
in the modules that the docstrings name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from trainer.objectives.hindsight_options import HindsightOpd
from trainer.objectives.names import validate_kl_loss_name
from trainer.objectives.option_base import Need, Options, SupportKind, TeacherReach

DEFAULT_SKEW = 0.5


class SupervisedOpd(TeacherReach):
    """The estimator of the KL to the teacher itself as the loss (ALGORITHMS 2.4, GKD)."""

    name: Literal["supervised_opd"]
    estimator: str = "k2"
    """abs, k2 (mse), k3 (low_var_kl), each also with +; k1 alone is refused."""
    opd_coef: PositiveFloat = 1.0
    """Weight of the estimator beside rewards; the source calls it beta (ALGORITHMS 7.2)."""
    loss_max_clamp: PositiveFloat | None = None
    """Clamp of the estimator's value, from both sides; none means off."""

    @property
    def kd_coef(self) -> float:
        """`opd_coef`."""
        return self.opd_coef

    @model_validator(mode="after")
    def _check(self) -> SupervisedOpd:
        validate_kl_loss_name(self.estimator)
        return self


class ForwardKlTopk(Options):
    """Forward KL on the teacher's top-k (kl.py; ALGORITHMS 2.5)."""

    name: Literal["forward_kl_topk"]
    topk: PositiveInt = 32
    """Teacher tokens per position."""
    log_prob_min_clamp: float | None = Field(default=None, lt=0)
    """Clamp of both log-probs from below; it removes gradients, so none is the default."""
    loss_max_clamp: PositiveFloat | None = None
    """Clamp of a token's loss; none means off."""

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """The teacher's top-k."""
        return frozenset({"teacher_scalar", "teacher_topk"})

    @property
    def support(self) -> SupportKind:
        """The teacher's."""
        return "teacher"

    @property
    def support_size(self) -> int:
        """`topk`."""
        return self.topk

    @property
    def compares_topk(self) -> bool:
        """For the overlap metrics."""
        return True


class TopkTailReverseKl(ForwardKlTopk):
    """Reverse KL on the teacher's top-k and one bucket for the rest (kl.py; 2.6)."""

    name: Literal["topk_tail_reverse_kl"]  # type: ignore[assignment]
    topk: PositiveInt = 50
    """Teacher tokens per position."""
    log_prob_min_clamp: None = None
    """Not part of this objective."""

    @property
    def compares_topk(self) -> bool:
        """Its metrics are the tails'."""
        return False


class SelfDistillation(Options):
    """SDPO's family of divergences (self_distillation.py; ALGORITHMS 2.7)."""

    name: Literal["self_distillation"]
    alpha: float = Field(default=0.5, ge=0, le=1)
    """0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."""
    topk: PositiveInt = 100
    """Tokens of the support per position; a value of the vocabulary's size is the exact KL."""
    support_of: Literal["student", "teacher"] = "student"
    """Whose top-k; the student's needs a teacher in the trainer."""
    tail: bool = True
    """One bucket for the rest; without it both sides are renormalised on the support."""
    is_clip: PositiveFloat | None = 2.0
    """Cap of the importance weight of the sampled token; none means no weight."""

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """By whose support it is."""
        return _support_needs(self.support_of)

    @property
    def support(self) -> SupportKind:
        """`support_of`."""
        return self.support_of

    @property
    def support_size(self) -> int:
        """`topk`."""
        return self.topk


class OverlapTopk(Options):
    """OpenClaw v2: clipped steps on the tokens of a small support, hint chosen by overlap
    (overlap_topk.py, hint_choice.py; ALGORITHMS 3.4, 3.5).
    """

    name: Literal["overlap_topk"]
    topk: PositiveInt = 4
    """Tokens of the support per position."""
    subset: Literal["student", "teacher", "overlap"] = "student"
    """Whose top-k: of the student at the start of the batch, of the teacher, or of both."""
    hint_choice: Literal["shortest", "token_optimal", "sequence_optimal"] = "sequence_optimal"
    """Which hint candidate teaches a token."""
    difference_clip: PositiveFloat | None = 1.0
    """Clamp of teacher minus student per token of the support; none means off."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Clip of the ratio below 1."""
    clip_high: PositiveFloat = 0.28
    """Clip of the ratio above 1."""
    opd_coef: PositiveFloat = 1.0
    """Weight of the distillation term."""

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """Teacher scores on the student's own tokens."""
        return _support_needs("student")

    @property
    def support(self) -> SupportKind:
        """`subset`."""
        return self.subset

    @property
    def kd_coef(self) -> float:
        """`opd_coef`."""
        return self.opd_coef

    @property
    def chooses_hints(self) -> bool:
        """By `hint_choice`."""
        return True

    @property
    def support_size(self) -> int:
        """`topk`."""
        return self.topk


class SideSampleOptions(Options):
    """Multi-sample Monte Carlo of a KL (side_samples.py; ALGORITHMS 5.2, 5.3)."""

    name: Literal["side_samples"]
    direction: Literal["reverse", "forward"] = "reverse"
    """Which KL. reverse: tokens are drawn by the weights that sampled the turn (slime: that served
    when it was scored). forward: by the teacher, which must be in the trainer.
    """
    samples: PositiveInt = 16
    """m: tokens drawn per position, with replacement."""
    advantage_reference: Literal["current", "old"] = "current"
    """Student log-probs in the advantage; `old` is the ablation."""
    clip: PositiveFloat | None = None
    """PPO clip on both sides; none leaves the ratio unclipped."""
    importance: bool = True
    """False sets every ratio to 1: the ablation without correction."""

    @model_validator(mode="after")
    def _check(self) -> SideSampleOptions:
        if self.clip is not None and not self.importance:
            raise ValueError("clip bounds a ratio that importance = false sets to 1; unset one")
        has_ratio = self.advantage_reference == "current" and self.clip is None and self.importance
        if self.direction == "forward" and not has_ratio:
            raise ValueError(
                "direction forward has no ratio: unset advantage_reference, clip and importance"
            )
        return self

    @property
    def has_ratio(self) -> bool:
        """Whether tokens are weighed by a ratio to the weights that drew them."""
        return self.direction == "reverse" and self.importance

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """A teacher that scores tokens which no agent saw, or draws them."""
        if self.direction == "forward":
            return frozenset({"teacher_scalar", "teacher_in_trainer"})
        return frozenset({"teacher_scalar", "teacher_tokens"})

    @property
    def support(self) -> SupportKind:
        """Drawn."""
        return "samples"

    @property
    def support_size(self) -> int:
        """`samples`."""
        return self.samples


class SparseKl(Options):
    """KL on a finite cache of tokens (sparse_kl.py; ALGORITHMS 5.4)."""

    name: Literal["sparse_kl"]
    direction: Literal["reverse", "forward", "skewed", "policy_gradient"] = "reverse"
    """Which KL; `policy_gradient` is the clipped form with softmax weights."""
    alpha: float = Field(default=DEFAULT_SKEW, ge=0, le=1)
    """Share of the forward KL in `skewed`."""
    topk: PositiveInt = 16
    """Tokens of the cache per position."""
    support_of: Literal["student", "teacher"] = "student"
    """Whose top-k. The student's is that of the student before the step or, where an engine
    teaches, of the weights that sampled the turn (slime: that served when it was scored).
    """
    tail: bool = False
    """In `skewed`, one more element for what is outside the cache; without it, the loss also falls
    when the student's mass leaves the cache.
    """
    token_clip: PositiveFloat | None = None
    """Clamp of an element of the sum from above; none means off."""

    @model_validator(mode="after")
    def _check(self) -> SparseKl:
        if self.direction != "skewed" and self.alpha != DEFAULT_SKEW:
            raise ValueError(f"alpha has no meaning in direction {self.direction}; unset it")
        if self.direction == "policy_gradient" and self.token_clip is not None:
            raise ValueError("token_clip has no meaning in direction policy_gradient; unset it")
        if self.direction != "skewed" and self.tail:
            raise ValueError(
                "tail belongs to direction skewed; with a tail, one direction alone is objective "
                "self_distillation (alpha 1 is reverse, 0 forward)"
            )
        return self

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """By whose support it is."""
        if self.support_of == "student":
            return frozenset({"teacher_scalar", "teacher_tokens"})
        return _support_needs(self.support_of)

    @property
    def support(self) -> SupportKind:
        """`support_of`."""
        return self.support_of

    @property
    def support_size(self) -> int:
        """`topk`."""
        return self.topk


def _support_needs(support_of: Literal["student", "teacher"]) -> frozenset[Need]:
    if support_of == "student":
        return frozenset({"teacher_scalar", "teacher_in_trainer"})
    return frozenset({"teacher_scalar", "teacher_topk"})


ObjectiveOptions: TypeAlias = Annotated[
    HindsightOpd
    | SupervisedOpd
    | ForwardKlTopk
    | TopkTailReverseKl
    | SelfDistillation
    | OverlapTopk
    | SideSampleOptions
    | SparseKl,
    Field(discriminator="name"),
]
OBJECTIVE_NAMES = (
    "hindsight_opd",
    "supervised_opd",
    "forward_kl_topk",
    "topk_tail_reverse_kl",
    "self_distillation",
    "overlap_topk",
    "side_samples",
    "sparse_kl",
)
HOW_TO_PROVIDE: Mapping[Need, str] = {
    "teacher_scalar": "let an engine score (scoring.engine_scores = true) or set trainer.teacher",
    "teacher_topk": "set scoring.top_k to at least the objective's topk, or trainer.teacher.kind "
    "to frozen, current, ema or trust_region",
    "teacher_tokens": "let an engine score (scoring.engine_scores = true), or set "
    "trainer.teacher.kind to frozen, current, ema or trust_region",
    "teacher_in_trainer": "set trainer.teacher.kind to frozen, current, ema or trust_region",
    "reward": "set judge.reward to verdict or votes, or to outcome with reward_outcome = only",
}


def unmet_needs(options: ObjectiveOptions, provided: frozenset[Need]) -> list[str]:
    """One line for each need that nothing provides, with what to set."""
    return [
        f"objective {options.name!r} needs {need}: {HOW_TO_PROVIDE[need]}"
        for need in sorted(options.needs - provided)
    ]
