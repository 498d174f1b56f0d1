"""The options of `hindsight_opd`: surrogate, advantage, rewards. It imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from trainer.objectives.names import check_loss_mode
from trainer.objectives.option_base import Need, OutcomePart, TeacherReach


class HindsightOpd(TeacherReach):
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
    """How the ratio and the advantage form a loss (ALGORITHMS 2.2, 5.3, 6.3 to 6.6)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Clip of the ratio below 1; CISPO's usual value is 1."""
    clip_high: PositiveFloat = 0.28
    """Clip of the ratio above 1; CISPO's usual value is 4."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of tokens with negative advantage; none means off."""
    advantage_reference: Literal["old", "current"] = "old"
    """Student log-probs in the advantage: at the start of the batch, or of the current weights."""
    estimator: str = "k1"
    """The estimate whose negative is the advantage; k1 gives the gap itself. abs and k3 lose its
    sign and give a warning, k2 and top-k divergences are refused (ALGORITHMS 2.4, 7.1).
    """
    loss_max_clamp: PositiveFloat | None = None
    """Clamp of the estimate whose negative is the advantage, from both sides; none means off."""
    opd_coef: float = Field(default=1.0, ge=0)
    """Weight of the teacher's gap; with 0 only rewards train (binary RL)."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the reward's advantage; above 0 the run needs `judge.reward`."""
    normalise: bool = False
    """Standardise the teacher's gaps over the batch (ALGORITHMS 7.3); for rewards there is
    `reward_baseline`.
    """
    reward_outcome: Literal["none", "only", "add"] = "none"
    """Rewards are the session's outcome (`only`), or that and the judge's reward for the turn
    (`add`; ALGORITHMS 3.3). Turns wait for it, at most `trainer.outcome_wait_s`.
    """
    reward_baseline: Literal["none", "step", "prompt", "passk", "session", "process"] = "none"
    """step, prompt: standardise rewards among equal step indices (ALGORITHMS 3.3) or equal prompts
    (8.7). passk: only the best answer to a prompt gains, by its lead (8.4). session: standardise
    outcomes among sessions that began with the same prompt, for all turns of each (8.7). process:
    outcomes, and what each turn added to the worth of its session, normalised separately (8.5,
    8.6); it needs `verifier.continuations`.
    """
    reward_best_of: int | None = Field(default=None, ge=2)
    """k: every k answers to a prompt share the best reward among them, before length and baseline
    (ALGORITHMS 8.4): one right answer in k is enough.
    """
    divide_by_std: bool = True
    """With a `reward_baseline`: divide by the standard deviation; false is Dr.GRPO."""
    length_penalty: Literal["none", "uniform", "group", "anchor"] = "none"
    """How a response's length reduces its reward, before the baseline (ALGORITHMS 8.8)."""
    length_coef: PositiveFloat | None = None
    """Its weight; unset: the source's values, uniform 1e-4, group 0.1, anchor 0.01."""
    length_anchor: PositiveInt | Literal["first_pass"] | None = None
    """`anchor` requires it: tokens that a response may have at no cost, or first_pass: for each
    prompt the mean length of its answers when nine of ten first passed, and no anchor before.
    """
    length_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the penalty rises linearly from 0: at full size from the start, it slows
    learning.
    """
    length_min_pass_rate: float | None = Field(default=None, gt=0, le=1)
    """The penalty acts on answers to prompts that pass at least this often, so that answers to hard
    ones may be long; unset: on all.
    """
    reward_kl_coef: float = Field(default=0.0, ge=0)
    """How much the reward loses per nat by which a response's log-prob under the policy before the
    step exceeds that under the frozen start, summed over its tokens, before the baseline
    (ALGORITHMS 8.9). Earlier answers to a prompt then do not count, as their nats are not known.
    """
    opsm_delta: PositiveFloat | None = None
    """Off-policy sequence mask: masks tokens with negative advantage in turns that moved further.
    """
    opsm_scope: Literal["token", "turn"] = "token"
    """Mask only such tokens, or their whole turn."""
    importance_cap: PositiveFloat = 5.0
    """Decoupled and A-3PO: a weight above it becomes 0."""
    engine_cap: PositiveFloat | None = None
    """Decoupled: correct the engine's arithmetic and the sample's age separately (ALGORITHMS 6.9).
    The first weight is capped at this, the second becomes 0 above `importance_cap`. Turns of older
    versions are scored once more, by the weights that sampled them.
    """
    second_moment_budget: PositiveFloat = 0.04
    """M2PO: mean squared log-ratio that tokens may keep."""

    @property
    def teacher_needs(self) -> frozenset[Need]:
        """A teacher's log-probs of the sampled tokens, unless its coefficient is 0."""
        return frozenset({"teacher_scalar"} if self.opd_coef > 0 else ())

    @property
    def kd_coef(self) -> float:
        """`opd_coef`."""
        return self.opd_coef

    @property
    def is_policy_gradient(self) -> bool:
        """Always."""
        return True

    @property
    def compares_rewards(self) -> bool:
        """With other turns, for a baseline or a pass rate, or with the response's length."""
        return (
            self.pass_rate_threshold is not None
            or self.reward_baseline != "none"
            or self.length_penalty != "none"
            or self.reward_best_of is not None
            or self.charges_kl
        )

    @property
    def compares_prompts(self) -> bool:
        """For a pass rate, and where an answer is compared with others to its prompt."""
        compares_rewards = (
            self.reward_baseline in ("step", "prompt", "passk")
            or self.length_penalty == "group"
            or self.reward_best_of is not None
        )
        rates = (self.pass_rate_threshold, self.length_min_pass_rate)
        needs_rates = any(rate is not None for rate in rates)
        return needs_rates or (compares_rewards and not self.charges_kl)

    @property
    def outcome_reward(self) -> OutcomePart | None:
        """As `reward_outcome`."""
        return None if self.reward_outcome == "none" else self.reward_outcome

    @property
    def compares_sessions(self) -> bool:
        """With `reward_baseline` session."""
        return self.reward_baseline == "session"

    @property
    def values_turns(self) -> bool:
        """With `reward_baseline` process."""
        return self.reward_baseline == "process"

    @property
    def charges_kl(self) -> bool:
        """With `reward_kl_coef`."""
        return self.reward_kl_coef > 0

    @property
    def needs_first_answers(self) -> bool:
        """For each prompt's own anchor."""
        return self.length_anchor == "first_pass"

    @property
    def needs_sampling_weights(self) -> bool:
        """With `engine_cap`."""
        return self.engine_cap is not None

    @property
    def needs_batch_statistics(self) -> bool:
        """For standardised advantages and M2PO's clip."""
        return self.normalise or self.surrogate == "m2po"

    @model_validator(mode="after")
    def _check(self) -> HindsightOpd:
        check_loss_mode(self.estimator, use_policy_gradient=True)
        if self.opd_coef == 0 and self.reward_coef == 0:
            raise ValueError("opd_coef and reward_coef are both 0: nothing to learn; set one")
        if self.dual_clip is not None and self.surrogate not in ("ppo", "gspo_sequence"):
            raise ValueError(f"dual_clip has no meaning with surrogate {self.surrogate}; unset it")
        if self.reward_baseline != "none" and self.reward_coef == 0:
            raise ValueError("reward_baseline needs reward_coef above 0")
        if self.reward_outcome != "none" and self.reward_coef == 0:
            raise ValueError("reward_outcome makes rewards: set reward_coef above 0")
        if self.reward_baseline in ("session", "process"):
            self._check_sessions(self.reward_baseline)
        if self.reward_best_of is not None and self.reward_coef == 0:
            raise ValueError("reward_best_of shares a reward: set reward_coef above 0")
        if self.reward_best_of is not None and self.reward_baseline == "passk":
            raise ValueError(
                "answers that share the best reward have no lead: unset reward_best_of, or set "
                "another reward_baseline than passk"
            )
        if self.charges_kl and self.reward_coef == 0:
            raise ValueError("reward_kl_coef takes from a reward: set reward_coef above 0")
        if self.surrogate in ("unclipped", "pure_is", "m2po") and self._moved_clips():
            raise ValueError(f"surrogate {self.surrogate} takes no clip_low, clip_high; unset them")
        if self.engine_cap is not None and self.surrogate != "decoupled":
            raise ValueError(
                f"engine_cap has no meaning with surrogate {self.surrogate}: unset it, or set "
                "surrogate = decoupled"
            )
        if not self.divide_by_std and self.reward_baseline == "none":
            raise ValueError("divide_by_std acts on a reward_baseline only; set that too")
        self._check_length()
        return self

    def _check_sessions(self, baseline: str) -> None:
        if self.reward_outcome != "only":
            raise ValueError(
                f"reward_baseline {baseline} compares outcomes of sessions: set reward_outcome = "
                '"only"'
            )
        if baseline == "process" and not self.divide_by_std:
            raise ValueError("divide_by_std = false has no meaning with reward_baseline process")
        beside = ("length_penalty", "reward_best_of", "reward_kl_coef")
        fields = type(self).model_fields
        moved = [name for name in beside if getattr(self, name) != fields[name].default]
        if self.pass_rate_threshold is not None:
            moved += ["mix" if self.mix == "replace" else "pass_rate_threshold"]
        if moved:
            raise ValueError(
                f"reward_baseline {baseline} compares sessions, not answers: unset "
                f"{', '.join(moved)}, or choose the baseline prompt"
            )

    def _moved_clips(self) -> bool:
        fields = type(self).model_fields
        return any(getattr(self, key) != fields[key].default for key in ("clip_low", "clip_high"))

    def _check_length(self) -> None:
        if self.length_penalty != "none" and self.reward_coef == 0:
            raise ValueError("length_penalty takes from a reward: set reward_coef above 0")
        if self.length_penalty == "none":
            for name in ("length_coef", "length_warmup_steps", "length_min_pass_rate"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no meaning without length_penalty; set that too")
        if (self.length_penalty == "anchor") != (self.length_anchor is not None):
            raise ValueError(
                "length_penalty = anchor and length_anchor (tokens, or first_pass) need each other"
            )
