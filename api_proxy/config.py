"""Settings of the door: where it listens, what it accepts, which turns it lets train."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SideRule(BaseModel):
    """A named test that marks a request as a side turn when no turn type was sent with it.

    All conditions that are set must hold. A rule without conditions never matches.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    """Shown in the metrics."""
    system_contains: str | None = None
    """Text in the first system (or developer) message."""
    last_message_contains: str | None = None
    """Text in the last message."""
    max_tokens_at_most: int | None = None
    """A requested reply budget of at most this many tokens: titles, classifications."""


class ProxyConfig(BaseModel):
    """The configuration of `api_proxy`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model_name: str = "policy"
    """The one model that this endpoint serves; requests for another get `model_not_found`."""
    context_length: int | None = Field(default=None, ge=2)
    """Tokens of prompt and reply together; unset: what the engine says of itself."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 lets the operating system choose."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Reply budget of a request that names none; unset: what the context leaves."""
    idle_timeout_s: float = Field(default=1800.0, gt=0)
    """A session without a request for this long is closed; also how far back a request is linked to
    an earlier turn when its message path does not match.
    """
    sweep_interval_s: float = Field(default=30.0, gt=0)
    """Pause between two searches for idle sessions."""
    train_length_cut: bool = False
    """Let replies that were cut at their token budget train."""
    train_modified: Literal["drop", "keep"] = "drop"
    """Turns that were not sampled from the plain softmax: temperature 0, top-p, forced prefix..."""
    train_mixed_version: bool = False
    """Let replies train of which some tokens belong to no single policy version, or whose keys and
    values do (`trainer.pause_mode` in_place).
    """
    side_rules: list[SideRule] = Field(default_factory=list)
    """Which requests are side turns when the agent does not say; none match by default."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Larger requests are refused with 413."""
    max_messages: int = Field(default=4096, ge=1)
    """Longer histories are refused with 400."""
    retry_after_s: int = Field(default=2, ge=1)
    """What a 503 tells the agent to wait."""
    max_continuations: int = Field(default=16, ge=0)
    """How often in a row, without a token in between, a reply that the engine broke off is
    continued from its partial tokens.
    """
    record_timeout_s: float = Field(default=10.0, gt=0)
    """How long the end of a reply waits for its turn to be committed; after that the turn is kept
    in the spill file and the reply goes out.
    """
    spill_retry_s: float = Field(default=1.0, gt=0)
    """Pause between two attempts to bring spilled turns to the store."""
    render_offload_chars: int = Field(default=16_000, ge=0)
    """Histories longer than this are rendered in a thread, so that other replies keep streaming."""
    token_cache_tokens: int = Field(default=4_000_000, ge=0)
    """Tokens of recent turns kept in memory to extend prompts without reading the store."""
    link_candidates: int = Field(default=32, ge=1)
    """Most earlier turns with an equal answer whose history is compared with a request's."""
