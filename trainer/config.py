"""The trainer's configuration: strict, with an explanation under each field.

It imports no torch, so that commands can read it without loading a model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from records.names import SideSource
from records.training.history.window import HistoryWindow
from records.training.outcome_rewards import OutcomeRewards
from records.training.share import LessonShares, Share
from rollout_bridge.engine.hold_file import HoldRules
from trainer.config_checks import check_combination, check_schedule, repeats_problem
from trainer.objectives.names import AggregationMode, validate_kl_loss_name
from trainer.objectives.options import HindsightOpd, ObjectiveOptions, SideSampleOptions
from trainer.objectives.rollout_correction.config import CorrectionConfig

Schedule = Literal["sync", "step_off", "async"]
"""When generation waits for training."""
HeldDtype = Literal["float32", "bfloat16"]
"""Precision in which weights that do not change are held."""


class LoraConfig(BaseModel):
    """Low-rank adapters instead of full weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveInt = 32
    """Scale: an adapter's product is multiplied by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Module names that get an adapter; "all-linear" is every linear layer except the head."""


def trains_all_weights(lora: object) -> bool:
    """Whether a value of `trainer.lora` asks for no adapters."""
    return lora is False or lora == "none"


class TeacherConfig(BaseModel):
    """Who scores the hinted prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["engine", "frozen", "current", "ema", "trust_region"] = "engine"
    """An engine's stored scores, or a model here: the start weights, the policy as it is, its
    moving average, or logits between start and policy.
    """
    ema_rate: float = Field(default=0.05, gt=0, le=1)
    """`ema`: share of the policy that enters the average after each step."""
    trust_region_alpha: float = Field(default=0.1, ge=0, le=1)
    """`trust_region`: the policy's share of the logits."""

    @property
    def in_trainer(self) -> bool:
        """Whether the trainer holds the teacher."""
        return self.kind != "engine"


class TrainerConfig(BaseModel):
    """How the policy is trained on ready samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    objective: ObjectiveOptions = Field(default_factory=HindsightOpd)
    """What is learned from the teacher, by name, with its own options."""
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    """Who teaches: an engine, or a model inside the trainer."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """How samples from other weights, or from another engine's arithmetic, are corrected."""
    aggregation: AggregationMode = "turn-mean-token-mean"
    """How the losses of tokens become one number."""
    aggregation_horizon: PositiveInt | None = None
    """Divisor of `seq-mean-token-sum-norm`, which requires it: the longest response allowed."""
    rollout_batch_size: PositiveInt = 16
    """Samples (turns) per step; a step waits until that many are ready."""
    max_share: float = Field(default=Share().most, gt=0, le=1)
    """Largest share of a batch that the turns of one scope (a tenant, or a key without one) fill
    while other scopes have ready turns; never below an equal share. If only one scope has ready
    turns, it fills the batch.
    """
    max_share_wait_s: float = Field(default=Share().wait_s, ge=0)
    """A batch that `max_share` leaves short is filled up with whatever is ready once a turn of the
    other scopes has been ready for this long.
    """
    lesson_counter_share: float = Field(default=LessonShares().counter, ge=0, lt=1)
    """Share of counter-lessons in a batch while hints are rehearsed: without them a policy learns
    to disobey open wishes.
    """
    lesson_keep_share: float = Field(default=LessonShares().keep, ge=0, lt=1)
    """Share of keep-lessons in a batch, against drift of everything that no hint is about."""
    lesson_hold_weight: float = Field(default=4.0, gt=0)
    """Weight of counter- and keep-lessons in the loss, where hinted samples have 1: the higher, the
    less a step damages open wishes and everything that no hint is about (docs/learning.md).
    """
    lesson_wait_s: float = Field(default=LessonShares().wait_s, ge=0)
    """A full batch of turns trains without lessons if these do not come for this long."""
    hint_wait_s: float = Field(default=LessonShares().hold_s, ge=0)
    """A turn waits at most this long until its hint has been examined and can be practised. Trained
    earlier, without counter-lessons, it would damage the open wish for the opposite.
    """
    whole_sessions: bool = False
    """Fill each batch up with all ready turns of its sessions, so that what they share is computed
    once: for recordings, where all turns of a session are ready together.
    """
    epochs_per_batch: PositiveInt = 1
    """Optimiser steps on one batch; above 1 the old log-probs are computed in a separate pass."""
    micro_batch_tokens: PositiveInt = 2048
    """Padded tokens per forward pass; a longer sequence gets a pass of its own. On a CPU, more
    tokens take more memory but no less time; a GPU is used better with 8192 or more.
    """
    memory_gb: PositiveFloat | None = None
    """Memory that the trainer may use, in 10^9 bytes; GPU memory if it runs on one. The cost of a
    token is measured at the start: micro-batches are made no larger than fits, and a turn that is
    too long is dropped (`beyond_trainer_memory`). Unset: nothing is measured.
    """
    logprob_chunk_tokens: PositiveInt = 1024
    """Policy tokens whose logits over the vocabulary exist at the same time."""
    max_steps: PositiveInt | None = None
    """Stop after this many trained steps; none means until stopped."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate changes after the warm-up: the latter two fall to 0 at `max_steps`. Only
    failures teach, so at a constant rate a policy swings between wishes that exclude each other; at
    a falling rate it settles.
    """
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximum global gradient norm."""

    beta_kl: float = Field(default=0.02, ge=0)
    """Weight of the KL to the frozen start; with 0 the start is not loaded a second time."""
    kl_type: str = "low_var_kl"
    """KL estimator; k1 as a loss is refused."""
    kl_ratio: Literal["none", "unbiased", "clipped"] = "none"
    """With several epochs: multiply the KL by the ratio to the start of the batch, as it is or
    clipped like the objective's (ALGORITHMS 6.10), or at 0.2 and 0.28 if that has no clip.
    """
    beta_entropy: float = 0.0
    """Weight of the entropy bonus; at 0 the entropy is computed for the metrics only."""

    prompt_history_versions: int = Field(default=32, ge=0)
    """For pass rates, and where a turn is compared with others, earlier rewarded answers to its
    prompt count if they were sampled at most this many versions before; 0: those of the same
    version as the batch's newest turn.
    """
    outcome_wait_s: float = Field(default=600.0, ge=0)
    """With `objective.reward_outcome`: how long a ready turn waits for its session's outcome. After
    that its hint trains without a reward; a turn without a hint is dropped (`no_outcome`).
    """
    max_staleness: int = Field(default=4, ge=0)
    """Ready turns older than this many versions expire. `schedule` may allow fewer."""
    replay_times: PositiveInt = 1
    """How many times a turn may train: after its first step it fills batches that lack new turns,
    until it has trained this often or is older than `max_staleness` (ALGORITHMS 6.11). For runs
    without rehearsal, which samples anew.
    """
    schedule: Schedule = "async"
    """Whether requests wait for training (docs/schedules.md). async: never, and turns that are too
    old expire. sync: from the moment a batch is full until its weights are served, so every sample
    has staleness 0. step_off: while generation is `steps_off` versions ahead.
    """
    steps_off: PositiveInt | None = None
    """With `schedule` step_off: how many versions generation may run ahead of training, and so how
    old samples may be.
    """
    max_hold_s: PositiveFloat = 300.0
    """Requests wait for at most this long for one step."""
    noise_floor_factor: float = Field(default=10.0, ge=0)
    """A batch whose mean |teacher - student| is below this multiple of the calibrated noise is
    skipped, unless rewards act in it.
    """
    calibration_bound: PositiveFloat = 1e-3
    """Largest log-prob gap between an engine and the trainer at the same weights."""
    max_nonfinite_frac: float = Field(default=0.01, ge=0, le=1)
    """Largest share of tokens with non-finite log-probs in a batch."""

    lora: LoraConfig | None = None
    """Train adapters instead of all weights; false (or "none") trains all."""
    base_dtype: Literal["auto"] | HeldDtype = "auto"
    """Precision of the frozen start weights: the base under `lora`, else the start that `beta_kl`
    and the calibration compare with. auto: bfloat16 if the model's config.json says that it is
    stored so, else float32. bfloat16 rounds a checkpoint of higher precision, for the run's own
    engines as well. Products are computed in `dtype` in either case.
    """
    gradient_checkpointing: bool | None = None
    """Keep only the input of each layer for the backward pass, which computes the rest again: a
    fraction of the memory, a third more time for a step's gradients, the same results. Unset: on,
    except for a small model.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass; trained weights and their optimiser state are float32 in both.
    """
    device: str = "cpu"
    """Torch device."""
    threads: PositiveInt | None = None
    """Threads of torch on the CPU; unset: one for a small model, else all cores."""
    seed: int = 0
    """Seed of everything random in the trainer."""

    keep_checkpoints: PositiveInt = 3
    """Checkpoints kept with weights; manifests of all are kept. An objective that needs the weights
    that sampled a turn keeps at least `max_staleness` + 1.
    """
    optimizer_every: PositiveInt = 1
    """How often, in steps, a checkpoint contains the optimiser's state (two thirds of a checkpoint
    of all weights). A run resumes from the newest that does: later steps are trained again.
    """
    lease_ttl_s: PositiveFloat = 3600.0
    """How long a batch stays leased to a trainer that does not answer."""
    poll_interval_s: PositiveFloat = 0.1
    """Pause between two checks for a full batch."""
    engine_check_interval_s: PositiveFloat = 5.0
    """Pause between two checks of the version that each engine serves."""
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    """What becomes of running requests while weights are loaded. retract: they continue afterwards,
    with keys and values computed anew; abort: the proxy sends them again with the tokens they have;
    in_place: they keep keys and values of the old weights, and their turns do not train (proxy.
    train_mixed_version).
    """
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """With `lora`: engines load each adapter next to the base, or weights that it is merged into.
    auto: adapters if every engine accepts them, which is tested at start.
    """
    publish_attempts: PositiveInt = 3
    """Attempts to load new weights into an engine before training goes on without it."""
    publish_backoff_s: PositiveFloat = 0.5
    """Pause between two such attempts, doubled each time."""
    tensorboard: bool = True
    """Write metrics for TensorBoard in addition to the JSON lines."""
    wandb: str | None = Field(default=None, min_length=1)
    """Project of Weights & Biases that gets the metrics, too. The package `wandb` is not installed
    with this one.
    """

    @field_validator("objective", mode="before")
    @classmethod
    def _name_is_optional(cls, value: object) -> object:
        """Options without a name are those of the default objective."""
        if isinstance(value, dict) and "name" not in value:
            return {"name": "hindsight_opd", **value}
        return value

    @field_validator("lora", mode="before")
    @classmethod
    def _all_weights(cls, value: object) -> object:
        """A value that asks for no adapters is None."""
        if trains_all_weights(value):
            return None
        if value is None or isinstance(value, dict | LoraConfig):
            return value
        raise ValueError(
            f"got {value!r}: write trainer.lora=false to train all weights, or trainer.lora.rank=8 "
            "for adapters"
        )

    @property
    def staleness_bound(self) -> int:
        """The largest staleness that a sample may have when it trains."""
        if self.schedule == "sync":
            return 0
        return self.steps_off or self.max_staleness

    @property
    def holds_generation(self) -> bool:
        """Whether the schedule ever holds requests."""
        return self.hold_rules.holds_generation

    @property
    def hold_rules(self) -> HoldRules:
        """When generation waits for training."""
        return HoldRules(
            schedule=self.schedule, steps_off=self.steps_off, max_hold_s=self.max_hold_s
        )

    @property
    def needs_start(self) -> bool:
        """Whether the policy is compared with the frozen start in every step."""
        return self.beta_kl > 0 or self.objective.charges_kl

    @property
    def side_source(self) -> SideSource | None:
        """Where a turn's stored side samples come from; None: it has none."""
        objective = self.objective
        if objective.support == "samples":
            forward = isinstance(objective, SideSampleOptions) and objective.direction == "forward"
            return SideSource.TEACHER if forward else SideSource.POLICY
        if "teacher_tokens" in objective.needs and not self.teacher.in_trainer:
            return SideSource.POLICY_TOP
        return None

    @property
    def asks_sampling_weights(self) -> bool:
        """Whether turns are scored by the weights that sampled them."""
        by_policy = self.side_source in (SideSource.POLICY, SideSource.POLICY_TOP)
        return self.objective.needs_sampling_weights or by_policy

    @property
    def versions_kept(self) -> int:
        """How many of the newest versions keep their weights."""
        if not self.asks_sampling_weights:
            return self.keep_checkpoints
        return max(self.keep_checkpoints, self.staleness_bound + 1)

    @property
    def history(self) -> HistoryWindow | None:
        """What to read of a prompt's earlier answers; None: nothing. Whatever rewards are compared
        with, metrics by difficulty need the prompt's pass rate.
        """
        objective = self.objective
        if "reward" not in objective.needs:
            return None
        return HistoryWindow(
            versions=self.prompt_history_versions,
            first=objective.needs_first_answers,
            sessions=objective.compares_sessions or objective.values_turns,
            values=objective.values_turns,
            outcomes=objective.outcome_reward is not None,
        )

    def outcomes(self, *, finishes: bool = False) -> OutcomeRewards | None:
        """How rewards are made from session outcomes; None: they are not. A run that `finishes`
        does not wait for outcomes.
        """
        kind = self.objective.outcome_reward
        if kind is None:
            return None
        return OutcomeRewards(
            kind=kind,
            wait_s=0.0 if finishes else self.outcome_wait_s,
            hints_train="teacher_scalar" in self.objective.needs,
        )

    @property
    def share(self) -> Share:
        """How much of a batch one scope may fill."""
        return Share(most=self.max_share, wait_s=self.max_share_wait_s)

    @property
    def lesson_shares(self) -> LessonShares:
        """How much of a batch lessons fill while hints are rehearsed."""
        return LessonShares.of_settings(self)

    def turns_per_step(self, *, with_lessons: bool) -> int:
        """The most turns that a step takes: with lessons, the counter- and keep-lessons fill the
        rest of a batch.
        """
        size = self.rollout_batch_size
        return size - sum(self.lesson_shares.of(size)) if with_lessons else size

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        validate_kl_loss_name(self.kl_type)
        check_combination(self)
        check_schedule(self)
        if self.objective.outcome_reward is not None and self.schedule != "async":
            raise ValueError(
                f"schedule {self.schedule} holds generation, but turns wait for session outcomes: "
                'set schedule = "async", or objective.reward_outcome = "none"'
            )
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must lie in [0, 1), got {self.adam_betas}")
        if self.lesson_counter_share + self.lesson_keep_share >= 1:
            raise ValueError(
                "lesson_counter_share and lesson_keep_share leave nothing for hints: their sum "
                "must be below 1"
            )
        if self.replay_times > 1 and (problem := repeats_problem(self)) is not None:
            raise ValueError(problem)
        if self.replay_times > 1 and self.staleness_bound == 0:
            raise ValueError(
                "replay_times above 1 needs turns that are older than the policy: set "
                "max_staleness above 0, and no schedule = sync"
            )
        if self.publish == "adapter" and self.lora is None:
            raise ValueError("publish = adapter needs adapters: set lora, or publish = auto")
        if self.max_steps is None and self.lr_decay_style != "constant":
            raise ValueError(f"lr_decay_style {self.lr_decay_style} needs max_steps: set it")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be less than max_steps {self.max_steps}"
            )
        return self
