"""Settings of rehearsal: how much of it there is, where, until when, and what stops it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rollout_bridge.config import ClaimLoopConfig

StateRule = Literal["tools", "judge", "near"]


class RehearsalConfig(BaseModel):
    """What becomes of the hints of the memory. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = False
    """Practise active hints on recorded states; `opd serve` begins its runs with it."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the policy engine's places (`policy.embedded.max_batch`, or 64) that is for lessons
    while there are some: they are begun before requests that wait, and take no more than these.
    SGLang needs `--enable-priority-scheduling` for it; without, they wait in line with requests.
    """
    pool: float = Field(default=1.0, ge=1, le=2)
    """How many steps' lessons are kept ready."""

    state_rule: StateRule = "judge"
    """Where a hint is practised: at states whose answer called the `tools` that the objected one
    called, at `near` ones (by the last user messages' words), or at near ones of which the `judge`
    says that the hint applies.
    """
    max_states: PositiveInt = 16
    """Most recorded states of one hint."""
    min_messages: PositiveInt = 3
    """Fewer different last user messages among them, and the hint waits for more."""
    held_back: float = Field(default=0.2, ge=0, le=0.5)
    """Share of a hint's states that measure and never train, from four states on."""
    max_keep_states: PositiveInt = 16
    """Most recorded states of other kinds that are kept as they are at a time."""

    prompt_samples: PositiveInt = 8
    """Answers of the start model to such a text; it must do in six of ten what the text asks."""
    start_samples: PositiveInt = 48
    """Answers of the start model to each open wish that measures obedience: what later versions are
    held against.
    """
    without_counter: bool = False
    """Rehearse hints with fewer than two usable open wishes for the opposite, too. What they teach
    is then done against open wishes as well, and obedience cannot be measured for them.
    """

    max_steps: PositiveInt = 40
    """Steps on a hint's lessons after which it is given up as `stuck`."""
    rest_at: float = Field(default=0.1, gt=0, lt=1)
    """A hint rests when the upper bound of its gap is at most this share of the first one."""
    wake_factor: float = Field(default=3.0, gt=1)
    """It wakes when its gap is more than this many times what let it rest."""
    gap_samples: PositiveInt = 16
    """Answers by which a hint's gap is measured, at each version."""
    keep_samples: PositiveInt = 16
    """Answers by which the gap to the start model is measured at states of other kinds."""
    obedience_samples: PositiveInt = 64
    """Answers to open wishes that never train, at each version."""
    obedience_versions: PositiveInt = 4
    """Versions over which obedience is pooled."""
    obedience_floor: float = Field(default=0.95, gt=0, le=1)
    """Training stops when the upper bound of obedience falls below this share of the start's."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of lessons. What measures is sampled at 1."""
    max_new_tokens: PositiveInt = 512
    """Longest answer."""
    poll_s: float = Field(default=0.5, gt=0)
    """Pause between two looks at what is to be done."""
    states_every_s: float = Field(default=30.0, gt=0)
    """Pause between two looks for further states of one hint."""
    loop: ClaimLoopConfig = ClaimLoopConfig()
    """Polling, and patience with engines that are down; its width comes from `share`."""
