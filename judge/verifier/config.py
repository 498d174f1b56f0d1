"""Settings of the verifier."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_bridge.config import ClaimLoopConfig

_URL = re.compile(r"https?://[\w.-]+(:\d+)?(/\S*)?|https?://\[[\da-fA-F:]+\](:\d+)?(/\S*)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class VerifierConfig(BaseModel):
    """What decides how well a session went. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    source: str | None = None
    """A function, `module:function`, importable from the folder that the run is started in, or a
    URL. It gets a session (docs/outcomes.md) and returns a number from 0 to 1 with a reason. Unset:
    no verifier is asked.
    """
    continuations: int = Field(default=0, ge=0, le=64)
    """How often the policy answers each prompt of a session again, each answer judged by the
    verifier as the session's last: what the turn was worth, for `reward_baseline = "process"`.
    """
    idle_s: float = Field(default=60.0, gt=0)
    """A session is over once nothing has happened in it for this long."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for an answer; a function that takes longer is killed."""
    loop: ClaimLoopConfig = ClaimLoopConfig(concurrency=2, poll_min_s=1.0, poll_max_s=5.0)
    """Sessions at a time, polling, and patience with a verifier that fails."""

    @model_validator(mode="after")
    def _is_asked(self) -> VerifierConfig:
        if self.continuations and self.source is None:
            raise ValueError("continuations are judged by a verifier: set source, too")
        return self

    @field_validator("source")
    @classmethod
    def _is_callable(cls, value: str | None) -> str | None:
        if value is None or _URL.fullmatch(value) or _FUNCTION.fullmatch(value):
            return value
        raise ValueError(f"got {value!r}: write module:function, or a URL that begins with http")


def is_url(source: str) -> bool:
    """Whether a verifier is asked over HTTP."""
    return source.startswith(("http://", "https://"))
