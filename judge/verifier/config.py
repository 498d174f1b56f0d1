"""Settings of the verifier."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollout_bridge.config import ClaimLoopConfig

_URL = re.compile(r"https?://[\w.-]+(:\d+)?(/\S*)?|https?://\[[\da-fA-F:]+\](:\d+)?(/\S*)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class VerifierConfig(BaseModel):
    """What says how well a session went. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    source: str | None = None
    """A function, `module:function`, found from the folder that the run is started in, or a URL.
    It gets a session (docs/outcomes.md) and returns a number from 0 to 1 with a reason. Unset: none
    is asked.
    """
    idle_s: float = Field(default=60.0, gt=0)
    """A session is over once nothing was heard of it for so long."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest answer; a function that takes longer is killed."""
    loop: ClaimLoopConfig = ClaimLoopConfig(concurrency=2, poll_min_s=1.0, poll_max_s=5.0)
    """Sessions at a time, polling, and patience with a verifier that fails."""

    @field_validator("source")
    @classmethod
    def _is_callable(cls, value: str | None) -> str | None:
        if value is None or _URL.fullmatch(value) or _FUNCTION.fullmatch(value):
            return value
        raise ValueError(f"got {value!r}: write module:function, or a URL that begins with http")


def is_url(source: str) -> bool:
    """Whether a verifier is asked over HTTP."""
    return source.startswith(("http://", "https://"))
