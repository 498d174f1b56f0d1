"""The options of every objective, by name; what each needs from the run, and what it refuses.

It imports no torch, because the configuration is read before any model is loaded. The formulas are
in the modules that the docstrings name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from trainer.objectives.kl_names import validate_kl_loss_name
from trainer.objectives.validation import check_loss_mode

Need: TypeAlias = Literal["teacher_scalar", "teacher_topk", "teacher_in_trainer", "reward"]
SupportKind: TypeAlias = Literal["none", "student", "teacher", "overlap", "samples"]
_SCALAR: frozenset[Need] = frozenset({"teacher_scalar"})


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @property
    def needs(self) -> frozenset[Need]:
        """What the run must provide."""
        return _SCALAR

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


class HindsightOpd(_Options):
    """Policy gradient with the teacher's gap as advantage (policy_gradient.py; ALGORITHMS 2.3)."""

    name: Literal["hindsight_opd"] = "hindsight_opd"
    surrogate: Literal[
        "ppo",
        "unclipped",
        "cispo",
        "gspo",
        "gspo_sequence",
        "pure_is",
        "decoupled",
        "a3po",
        "m2po",
    ] = "ppo"
    """How the ratio and the advantage make a loss (ALGORITHMS 2.2, 5.3, 6.3 to 6.6)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Clip of the ratio below 1; CISPO's usual value is 1."""
    clip_high: PositiveFloat = 0.28
    """Clip of the ratio above 1; CISPO's usual value is 4."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of tokens with negative advantage; none means off."""
    advantage_reference: Literal["old", "current"] = "old"
    """Student log-probs in the advantage: at the start of the batch, or of the current weights."""
    estimator: str = "k1"
    """What is negated into the advantage; k1 is the gap itself. abs and k3 lose its sign and are
    warned of, k2 and top-k divergences are refused (ALGORITHMS 2.4, 7.1).
    """
    opd_coef: float = Field(default=1.0, ge=0)
    """Weight of the teacher's gap; 0 leaves rewards alone (binary RL)."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the reward's advantage; above 0 the run needs `judge.reward`."""
    mix: Literal["sum", "replace"] = "sum"
    """Add both advantages, or take the teacher's where a turn is eligible (ALGORITHMS 7.2)."""
    pass_rate_threshold: float | None = Field(default=None, ge=0, le=1)
    """With `mix = replace`: prompts that pass at most this often are eligible. Required there."""
    horizon: PositiveInt | None = None
    """The teacher's advantage acts on the first tokens of a response only."""
    normalise: bool = False
    """Standardise the teacher's gaps over the batch (ALGORITHMS 7.3); for rewards there is
    `reward_baseline`.
    """
    reward_baseline: Literal["none", "step", "prompt", "passk"] = "none"
    """Standardise rewards among equal step indices (ALGORITHMS 3.3) or equal prompts (8.7); or only
    the best answer to a prompt gains, by how far it is ahead (8.4).
    """
    divide_by_std: bool = True
    """With a `reward_baseline`: divide by the standard deviation; without it is Dr.GRPO."""
    length_penalty: Literal["none", "uniform", "group", "anchor"] = "none"
    """What a response's length takes from its reward, before the baseline (ALGORITHMS 8.8)."""
    length_coef: PositiveFloat | None = None
    """Its weight; unset is the source's: uniform 1e-4, group 0.1, anchor 0.01."""
    length_anchor: PositiveInt | None = None
    """`anchor`: tokens that a response may have at no cost. Required there."""
    opsm_delta: PositiveFloat | None = None
    """Off-policy sequence mask: tokens with negative advantage of turns that moved further."""
    opsm_scope: Literal["token", "turn"] = "token"
    """Mask such tokens alone, or their whole turn."""
    importance_cap: PositiveFloat = 5.0
    """Decoupled and A-3PO: a weight above it becomes 0."""
    second_moment_budget: PositiveFloat = 0.04
    """M2PO: mean squared log-ratio that tokens may keep."""

    @property
    def needs(self) -> frozenset[Need]:
        """A teacher unless its coefficient is 0, rewards if theirs is not."""
        teacher: frozenset[Need] = frozenset({"teacher_scalar"} if self.opd_coef > 0 else ())
        reward: frozenset[Need] = frozenset({"reward"} if self.reward_coef > 0 else ())
        return teacher | reward

    @property
    def is_policy_gradient(self) -> bool:
        """Always."""
        return True

    @property
    def needs_batch_statistics(self) -> bool:
        """For standardised advantages and M2PO's clip."""
        return self.normalise or self.surrogate == "m2po"

    @model_validator(mode="after")
    def _check(self) -> HindsightOpd:
        check_loss_mode(self.estimator, use_policy_gradient=True)
        if self.opd_coef == 0 and self.reward_coef == 0:
            raise ValueError("opd_coef and reward_coef are both 0: nothing to learn; set one")
        if self.mix == "replace" and (self.pass_rate_threshold is None or self.reward_coef == 0):
            raise ValueError("mix = replace needs pass_rate_threshold and reward_coef above 0")
        if self.mix == "sum" and self.pass_rate_threshold is not None:
            raise ValueError("pass_rate_threshold acts with mix = replace only; set that too")
        if self.dual_clip is not None and self.surrogate not in ("ppo", "gspo_sequence"):
            raise ValueError(f"dual_clip has no meaning with surrogate {self.surrogate}; unset it")
        if self.reward_baseline != "none" and self.reward_coef == 0:
            raise ValueError("reward_baseline needs reward_coef above 0")
        if not self.divide_by_std and self.reward_baseline == "none":
            raise ValueError("divide_by_std acts on a reward_baseline only; set that too")
        self._check_length()
        return self

    def _check_length(self) -> None:
        if self.length_penalty != "none" and self.reward_coef == 0:
            raise ValueError("length_penalty takes from a reward: set reward_coef above 0")
        if self.length_penalty == "none" and self.length_coef is not None:
            raise ValueError("length_coef has no meaning without length_penalty; set that too")
        if (self.length_penalty == "anchor") != (self.length_anchor is not None):
            raise ValueError(
                "length_penalty = anchor and length_anchor, in tokens, need each other"
            )


class SupervisedOpd(_Options):
    """The estimator of the KL to the teacher itself as the loss (ALGORITHMS 2.4, GKD)."""

    name: Literal["supervised_opd"]
    estimator: str = "k2"
    """abs, k2 (mse), k3 (low_var_kl), each also with +; k1 alone is refused."""
    loss_max_clamp: PositiveFloat | None = None
    """Clamp of the estimator's value, from both sides; none means off."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of a PPO term on rewards beside it; above 0 the run needs `judge.reward`."""

    @property
    def needs(self) -> frozenset[Need]:
        """The teacher's log-probs of the sampled tokens, rewards if weighted."""
        reward: frozenset[Need] = frozenset({"reward"} if self.reward_coef > 0 else ())
        return reward | _SCALAR

    @model_validator(mode="after")
    def _check(self) -> SupervisedOpd:
        validate_kl_loss_name(self.estimator)
        return self


class ForwardKlTopk(_Options):
    """Forward KL on the teacher's top-k (forward_kl.py; ALGORITHMS 2.5)."""

    name: Literal["forward_kl_topk"]
    topk: PositiveInt = 32
    """Teacher tokens per position."""
    log_prob_min_clamp: float | None = Field(default=None, lt=0)
    """Clamp of both log-probs from below; it removes gradients, so none is the default."""
    loss_max_clamp: PositiveFloat | None = None
    """Clamp of a token's loss; none means off."""

    @property
    def needs(self) -> frozenset[Need]:
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
    """Reverse KL on the teacher's top-k and one bucket for the rest (tail_kl.py; 2.6)."""

    name: Literal["topk_tail_reverse_kl"]  # type: ignore[assignment]
    topk: PositiveInt = 50
    """Teacher tokens per position."""
    log_prob_min_clamp: None = None
    """Not part of this objective."""

    @property
    def compares_topk(self) -> bool:
        """Its metrics are the tails'."""
        return False


class SelfDistillation(_Options):
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
    def needs(self) -> frozenset[Need]:
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


class OverlapTopk(_Options):
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
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of a PPO term on rewards beside it; above 0 the run needs `judge.reward`."""

    @property
    def needs(self) -> frozenset[Need]:
        """Teacher scores on the student's own tokens, rewards if weighted."""
        reward: frozenset[Need] = frozenset({"reward"} if self.reward_coef else ())
        return reward | _support_needs("student")

    @property
    def support(self) -> SupportKind:
        """`subset`."""
        return self.subset

    @property
    def chooses_hints(self) -> bool:
        """By `hint_choice`."""
        return True

    @property
    def support_size(self) -> int:
        """`topk`."""
        return self.topk


class SideSamples(_Options):
    """Multi-sample Monte Carlo of the reverse KL (side_samples.py; ALGORITHMS 5.2, 5.3)."""

    name: Literal["side_samples"]
    samples: PositiveInt = 16
    """m: tokens drawn per position, with replacement, from the student."""
    advantage_reference: Literal["current", "old"] = "current"
    """Student log-probs in the advantage; `old` is the ablation."""
    clip: PositiveFloat | None = None
    """PPO clip on both sides; none leaves the ratio alone."""
    importance: bool = True
    """False sets every ratio to 1: the ablation without correction."""

    @property
    def needs(self) -> frozenset[Need]:
        """A teacher that scores tokens which no agent saw."""
        return frozenset({"teacher_scalar", "teacher_in_trainer"})

    @property
    def support(self) -> SupportKind:
        """Drawn."""
        return "samples"

    @property
    def support_size(self) -> int:
        """`samples`."""
        return self.samples


class SparseKl(_Options):
    """KL on a finite cache of tokens, no tail (sparse_kl.py; ALGORITHMS 5.4)."""

    name: Literal["sparse_kl"]
    direction: Literal["reverse", "forward", "skewed", "policy_gradient"] = "reverse"
    """Which KL; `policy_gradient` is the clipped form with softmax weights."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Share of the forward KL in `skewed`."""
    topk: PositiveInt = 16
    """Tokens of the cache per position."""
    support_of: Literal["student", "teacher"] = "student"
    """Whose top-k; the student's needs a teacher in the trainer."""
    token_clip: PositiveFloat | None = None
    """Clamp of an element of the sum from above; none means off."""

    @property
    def needs(self) -> frozenset[Need]:
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
    | SideSamples
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
    "teacher_in_trainer": "set trainer.teacher.kind to frozen, current, ema or trust_region",
    "reward": "set judge.reward to verdict or votes",
}


def unmet_needs(options: ObjectiveOptions, provided: frozenset[Need]) -> list[str]:
    """One line for each need that nothing provides, with what to set."""
    return [
        f"objective {options.name!r} needs {need}: {HOW_TO_PROVIDE[need]}"
        for need in sorted(options.needs - provided)
    ]
