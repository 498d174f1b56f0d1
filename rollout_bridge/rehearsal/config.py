"""Settings of rehearsal: how much of it there is, where, until when, and what stops it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rollout_bridge.config import ClaimLoopConfig

StateRule = Literal["tools", "judge", "near"]


class RehearsalConfig(BaseModel):
    """How the memory's hints are practised. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = False
    """Practise active hints on recorded states; `opd serve` turns it on in new runs."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the policy engine's places (`policy.embedded.max_batch`, or 64) for lessons while
    there are any: they start before waiting requests. While no agent waits for an answer, an
    embedded engine gives lessons up to three quarters of its places; otherwise they take no more
    than these. SGLang needs `--enable-priority-scheduling` for it; without it, they wait in line
    with requests.
    """
    pool: float = Field(default=1.0, ge=1, le=2)
    """How many steps' lessons are kept ready."""

    state_rule: StateRule = "judge"
    """Where a hint is practised: at states whose answer called the same `tools` as the one objected
    to, at `near` ones (by the last user messages' words), or at near ones where the `judge` says
    that the hint applies.
    """
    max_states: PositiveInt = 16
    """Maximum number of recorded states per hint."""
    min_messages: PositiveInt = 3
    """With fewer different last user messages among them, the hint waits for more."""
    held_back: float = Field(default=0.2, ge=0, le=0.5)
    """Share of a hint's states that only measure and never train, from four states on."""
    max_keep_states: PositiveInt = 16
    """Maximum number of recorded states of other kinds that are kept as they are at a time."""

    prompt_samples: PositiveInt = 8
    """Answers of the start model to each open wish; six of ten must do what it asks."""
    start_samples: PositiveInt = 48
    """Answers of the start model to each open wish that measures obedience: the baseline of later
    versions.
    """
    without_counter: bool = False
    """Also rehearse hints with fewer than two usable open wishes for the opposite. The policy then
    follows them against open wishes too, and obedience cannot be measured for them.
    """

    max_steps: PositiveInt = 40
    """Steps on a hint's lessons after which it is given up as `stuck`."""
    rest_at: float = Field(default=0.1, gt=0, lt=1)
    """A hint rests when the upper bound of its gap is at most this share of the first one."""
    wake_factor: float = Field(default=3.0, gt=1)
    """It wakes when its gap is more than this many times the one at which it came to rest."""
    gap_samples: PositiveInt = 16
    """Answers that measure a hint's gap, at each version."""
    keep_samples: PositiveInt = 16
    """Answers that measure the gap to the start model at states of other kinds."""
    obedience_samples: PositiveInt = 64
    """Answers to open wishes that never train, at each version. With fewer, chance alone more often
    turns a step into one that wins open wishes back, or stops training.
    """
    obedience_versions: PositiveInt = 4
    """Versions over which obedience is pooled."""
    obedience_floor: float = Field(default=0.95, gt=0, le=1)
    """Training stops when the upper bound of obedience falls below this share of the start's."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of lessons. Measurements are sampled at 1."""
    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens."""
    poll_s: float = Field(default=0.5, gt=0)
    """Pause between two checks for work."""
    states_every_s: float = Field(default=30.0, gt=0)
    """Pause between two searches for further states of one hint."""
    loop: ClaimLoopConfig = ClaimLoopConfig()
    """Polling, and patience with engines that are down; its width comes from `share`."""
