"""Settings of the endpoint: where it listens, what it accepts, which turns it lets train."""

from __future__ import annotations

import ipaddress
import re
from functools import cache
from typing import Literal, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from api_proxy.sharing.sharing import MOST_WORKERS

SidePreset: TypeAlias = Literal[
    "pings", "claude_code", "open_webui", "librechat", "codex", "opencode", "gemini_and_qwen_cli"
]
"""Agents whose side requests are known (api_proxy/linking/side_presets.py)."""


class SideRule(BaseModel):
    """A named test that marks a request as a side turn when no turn type was sent with it.

    All conditions that are set must hold. A rule without conditions never matches.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    """Shown in the metrics and kept with each turn that the rule marked."""
    system_contains: str | None = None
    """Text in the first system (or developer) message."""
    last_message_contains: str | None = None
    """Text in the last message."""
    last_message_begins: str | None = None
    """Text at the beginning of the last message, after any blanks."""
    last_message_is: str | None = None
    """The whole last message, without blanks around it."""
    max_tokens_at_most: int | None = None
    """A requested reply budget of at most this many tokens: titles, classifications."""
    is_summary: bool = False
    """The reply summarises the conversation: a later request that contains it continues the same
    session.
    """


class ProxyConfig(BaseModel):
    """The configuration of `api_proxy`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model_name: str = "policy"
    """The one model that this endpoint serves; requests for another get `model_not_found`."""
    model_aliases: list[str] = Field(default_factory=list)
    """Further names that it answers to, for agents that send a fixed one (`gpt-4o`); "*": any name
    of at most 256 characters. Replies repeat the name that was asked for.
    """
    context_length: int | None = Field(default=None, ge=2)
    """Tokens of prompt and reply together; unset: what the engine reports."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 lets the operating system choose."""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Processes that serve the port together; one for each core that engine and trainer leave free
    is enough. Requests of a conversation may reach any of them. The limits of keys hold for all
    together; of `max_running`, `max_waiting`, `max_connections` and `max_bytes_in_progress` each
    gets its share.
    """
    allowed_origins: list[str] = Field(default_factory=list)
    """Web pages that may use the endpoint (CORS), by origin: `https://chat.example.com`; "*": all,
    once there are keys. None by default: browsers then keep every page out.
    """
    key_refresh_s: float = Field(default=2.0, gt=0)
    """API keys that were made, rotated or revoked are known to the proxy within this time."""
    key_grace_s: float = Field(default=3600.0, gt=0)
    """How long known keys keep working while the store does not answer."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Reply budget of a request that names none; unset: what the context leaves."""
    idle_timeout_s: float = Field(default=1800.0, gt=0)
    """A session without a request for this long is closed; also how far back a request is linked to
    an earlier turn when its message path does not match.
    """
    sweep_interval_s: float = Field(default=30.0, gt=0)
    """Pause between two searches for idle sessions."""
    train_length_cut: bool = True
    """Let replies that were cut at their token budget train: answers that run on are what a user
    corrects (docs/learning.md, "A pretrained model").
    """
    train_modified: Literal["drop", "keep"] = "drop"
    """Turns that were not sampled from the plain softmax: temperature 0, top-p, forced prefix..."""
    train_mixed_version: bool = False
    """Let replies train if some of their tokens, or of their keys and values, belong to no single
    policy version (`trainer.pause_mode` in_place).
    """
    side_rules: list[SideRule] = Field(default_factory=list)
    """Which requests are side turns if the agent does not say so; tried before the presets."""
    side_presets: list[SidePreset] = Field(default_factory=lambda: list(get_args(SidePreset)))
    """Ready rules for known agents (api_proxy/linking/side_presets.py); all of them by default."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Larger requests are refused with 413."""
    max_bytes_in_progress: int = Field(default=256 * 2**20, ge=1024)
    """Bytes of the bodies of all requests that are being answered; half of them for one tenant.
    Requests beyond that are refused with 429 (the tenant's share) or 503.
    """
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Requests that take longer to arrive are refused with 408."""
    header_timeout_s: float = Field(default=15.0, gt=0)
    """Connections whose request line and headers take longer to arrive are closed."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """Connections whose client reads next to nothing (64 KiB) of what is sent for this long are
    closed, and their replies end.
    """
    max_header_bytes: int = Field(default=65_536, ge=1024)
    """Request line and headers; longer ones are refused with 431."""
    max_connections: int = Field(default=16_384, ge=1)
    """Connections beyond this are closed at once. The operating system's limit on open files
    applies too: it is raised at the start as far as possible.
    """
    max_running: int = Field(default=512, ge=1)
    """Replies that are sampled at the same time; further requests wait for a place."""
    reserved_share: float = Field(default=0.125, ge=0, lt=1)
    """Share of these places that is reserved for tenants that have few or none: a tenant leaves as
    many places free as it has, at most this share. Of two or more places, at least one is reserved,
    unless this is 0.
    """
    max_waiting: int = Field(default=1024, ge=0)
    """Requests that wait for a place; if there are more, some are refused with 429."""
    usage_flush_s: float = Field(default=5.0, gt=0)
    """Pause between two updates in the store of what keys have used of their daily quota."""
    shutdown_grace_s: float = Field(default=10.0, ge=0)
    """How long replies may go on when the proxy is told to stop; then they are cut off."""
    max_messages: int = Field(default=4096, ge=1)
    """Longer histories are refused with 400."""
    max_tools: int = Field(default=512, ge=1)
    """Requests with more tools are refused with 400."""
    max_parts: int = Field(default=1024, ge=1)
    """Messages with more parts (blocks) are refused with 400."""
    max_tool_calls: int = Field(default=256, ge=1)
    """Messages of the history with more tool calls are refused with 400."""
    max_logit_bias: int = Field(default=1024, ge=0)
    """More ids in `logit_bias` are refused with 400."""
    max_bytes_per_token: int = Field(default=16, ge=1)
    """Messages and tools with more bytes (as JSON) than this for each token of the context are
    refused before they are rendered.
    """
    max_schema_bytes: int = Field(default=131_072, ge=1024)
    """Longer schemas that the reply must match (all of them together) are refused with 400."""
    max_json_values: int = Field(default=100_000, ge=100)
    """Values (objects, lists and what is in them) in the JSON of one request; more are refused with
    400. `/v1/completions` may have the ids of a whole context in addition.
    """
    max_json_depth: int = Field(default=100, ge=8, le=200)
    """Requests whose JSON nests deeper are refused with 400."""
    max_feedback_chars: int = Field(default=16_384, ge=1)
    """Longer texts and corrected answers are refused by `/v1/feedback`: the judge reads them
    all.
    """
    retry_after_s: int = Field(default=2, ge=1)
    """How long a 503 tells the agent to wait."""
    max_continuations: int = Field(default=16, ge=0)
    """How often in a row, without a new token in between, a reply that the engine interrupted is
    continued from its partial tokens.
    """
    record_timeout_s: float = Field(default=10.0, gt=0)
    """How long the end of a reply waits for its turn to be committed; after that the turn is kept
    in the spill file and the reply goes out.
    """
    spill_retry_s: float = Field(default=1.0, gt=0)
    """Pause between two attempts to move spilled turns to the store."""
    render_offload_chars: int = Field(default=16_000, ge=0)
    """Requests of more bytes than this are parsed, linked and rendered in a thread, so that other
    replies keep streaming.
    """
    token_cache_tokens: int = Field(default=4_000_000, ge=0)
    """Tokens of recent turns kept in memory to extend prompts without reading the store."""
    link_candidates: int = Field(default=32, ge=1)
    """At most this many earlier turns with an equal answer have their history compared with a
    request's.
    """

    @field_validator("allowed_origins")
    @classmethod
    def _origins_have_no_path(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"{origin!r} is not an origin: give only scheme, host and port, as in "
                    "'https://chat.example.com' or 'http://localhost:3000'"
                )
        return value

    @model_validator(mode="after")
    def _every_worker_has_a_place(self) -> Self:
        if self.workers > self.max_running:
            raise ValueError(
                f"workers = {self.workers} is more than max_running = {self.max_running}: each "
                "worker needs a place for a reply"
            )
        return self

    def share_of(self, number: int) -> ProxyConfig:
        """What worker `number` (from 1) may use. There is room for two of the longest bodies: a
        tenant gets half of it.
        """

        def part(total: int) -> int:
            return total // self.workers + (number <= total % self.workers)

        bodies = max(part(self.max_bytes_in_progress), 2 * self.max_body_bytes)
        return self.model_copy(
            update={
                "max_running": part(self.max_running),
                "max_waiting": part(self.max_waiting),
                "max_connections": max(part(self.max_connections), 1),
                "max_bytes_in_progress": min(bodies, self.max_bytes_in_progress),
            }
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the endpoint."""
        return _is_loopback(self.host)


@cache
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
