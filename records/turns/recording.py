"""What is known about a turn that came from a recording instead of a live agent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

REPLAY_PRIORITY = 1
"""The priority of turns of recordings: whatever live agents wait for goes first."""


class RecordingKind(StrEnum):
    """Who sampled the response of a turn that did not come through the endpoint."""

    RECORDED = "recorded"
    """Somebody else, with unknown probability: the policy's own log-probs stand in for it, so that
    importance weights correct only for what the policy learned since.
    """
    RECORDED_WITH_LOGPROBS = "recorded_with_logprobs"
    """Somebody else, with known log-probs."""
    RESAMPLED = "resampled"
    """The policy of this run, at a recorded state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Where a turn comes from. `position` is its place in the `source`'s conversation.

    `held_out` turns are judged and scored but never trained on. `votes` are a judge's answers that
    came with the recording; no judge is asked then.
    """

    kind: RecordingKind
    source: str
    position: int
    held_out: bool = False
    votes: tuple[str, ...] | None = None
