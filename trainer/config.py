"""The trainer's configuration: strict, with a reason under each field.

It imports no torch, so that commands can read it without loading a model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from trainer.objectives.kl_names import validate_kl_loss_name


class LoraConfig(BaseModel):
    """Low-rank adapters instead of full weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveInt = 32
    """Scale: an adapter's product is multiplied by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Module names that get an adapter; "all-linear" is every linear layer but the head."""


class TrainerConfig(BaseModel):
    """How the policy is trained on ready samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    objective: str = "hindsight_opd"
    """Name of the objective in trainer/objectives/registry.py."""
    rollout_batch_size: PositiveInt = 16
    """Samples (turns) per step; a step waits until that many are ready."""
    epochs_per_batch: PositiveInt = 1
    """Optimiser steps on one batch; above 1 the old log-probs are computed in a pass of their
    own.
    """
    micro_batch_tokens: PositiveInt = 8192
    """Padded tokens per forward pass; a longer sequence gets a pass of its own."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Policy tokens whose logits over the vocabulary exist at one time."""
    max_steps: PositiveInt | None = None
    """Stop after this many trained steps; none means until stopped."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly; constant afterwards."""
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximum global gradient norm."""

    clip_low: PositiveFloat = 0.2
    """PPO clip below 1."""
    clip_high: PositiveFloat = 0.28
    """PPO clip above 1."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of tokens with negative advantage; none means off."""
    tis_cap: float = Field(default=2.0, ge=0)
    """Cap C of the truncated importance weights; 0 means no correction for stale samples."""
    advantage_reference: Literal["old", "current"] = "old"
    """Student log-probs in the advantage: at the start of the batch, or of the current weights."""
    beta_kl: float = Field(default=0.02, ge=0)
    """Weight of the KL to the frozen start; 0 does not load the start a second time."""
    kl_type: str = "low_var_kl"
    """KL estimator; k1 as a loss is refused."""
    beta_entropy: float = 0.0
    """Weight of the entropy bonus; at 0 the entropy is computed for the metrics only."""

    max_staleness: int = Field(default=4, ge=0)
    """Ready turns older than this many versions expire."""
    noise_floor_factor: float = Field(default=10.0, ge=0)
    """A batch whose mean |advantage| is below this multiple of the calibrated noise is skipped."""
    calibration_bound: PositiveFloat = 1e-3
    """Largest log-prob gap between an engine and the trainer at the same weights."""
    max_nonfinite_frac: float = Field(default=0.01, ge=0, le=1)
    """Largest share of tokens with non-finite log-probs in a batch."""

    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass; weights and optimiser state are float32 in both."""
    device: str = "cpu"
    """Torch device."""
    threads: PositiveInt = 1
    """Threads of torch on the CPU."""
    seed: int = 0
    """Seed of everything random in the trainer."""

    keep_checkpoints: PositiveInt = 3
    """Checkpoints kept with weights; manifests of all are kept."""
    lease_ttl_s: PositiveFloat = 3600.0
    """How long a batch stays leased to a trainer that does not answer."""
    poll_interval_s: PositiveFloat = 0.1
    """Pause between two looks for a full batch."""
    engine_check_interval_s: PositiveFloat = 5.0
    """Pause between two looks at the version that each engine serves."""
    publish_attempts: PositiveInt = 3
    """Attempts to load new weights into an engine before training goes on without it."""
    publish_backoff_s: PositiveFloat = 0.5
    """Pause between two such attempts, doubled each time."""
    tensorboard: bool = True
    """Write metrics for TensorBoard beside the JSON lines."""

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        validate_kl_loss_name(self.kl_type)
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must lie in [0, 1), got {self.adam_betas}")
        return self
