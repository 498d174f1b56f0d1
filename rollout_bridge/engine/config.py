"""Configuration of the engine client: every wait is finite."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineClientConfig(BaseModel):
    """Timeouts in seconds, retries and pool size of one client."""

    model_config = ConfigDict(extra="forbid")

    connect_timeout_s: float = Field(default=10.0, gt=0)
    """To open a connection."""
    first_token_timeout_s: float = Field(default=900.0, gt=0)
    """From sending a streamed request to its first token: queueing, prefill and weight updates.
    Longer than `control_timeout_s`, so that an update that may still succeed costs no reply.
    """
    between_tokens_timeout_s: float = Field(default=900.0, gt=0)
    """Between two tokens of a stream, as above. An engine that dies is noticed at once."""
    total_timeout_s: float = Field(default=1800.0, gt=0)
    """A whole generation, streamed or not."""
    score_timeout_s: float = Field(default=300.0, gt=0)
    """One scoring request."""
    control_timeout_s: float = Field(default=600.0, gt=0)
    """Weight updates, pause and resume."""
    probe_timeout_s: float = Field(default=5.0, gt=0)
    """Health, model information, abort."""
    attempts: int = Field(default=4, ge=1)
    """Tries of one request on transport errors and 5xx; a stream is never tried again after its
    first token.
    """
    retry_wait_s: float = Field(default=0.2, gt=0)
    """First wait before another try; it doubles, with jitter."""
    retry_wait_max_s: float = Field(default=5.0, gt=0)
    """Longest wait before another try."""
    pool_size: int = Field(default=256, ge=1)
    """Most connections at once."""
    routed_experts_topk: int = Field(default=0, ge=0)
    """Experts per token of a mixture-of-experts model, whose choices are returned and stored for
    replay (SGLang: started with --enable-return-routed-experts); 0: they are not requested.
    """
