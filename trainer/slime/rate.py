"""The learning rate of a batch's steps on slime: smaller after versions that lost many open wishes
(rollout_bridge/rehearsal/recovery.py).

slime's hook before each step is not told the batch, so the hooks that see the batch note its factor
here, on every rank and pipeline stage.
"""

from __future__ import annotations

from typing import Any, Protocol

from rollout_bridge.slime.carrier import RowCarrier


class Scheduler(Protocol):
    """Megatron's scheduler of learning rates."""

    optimizer: Any

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The scheduled rate of the next step."""
        ...


class BatchRate:
    """The factor for this process's steps on the current batch."""

    def __init__(self) -> None:
        self._factor: float | None = None

    def note(self, carriers: list[RowCarrier]) -> None:
        """A new batch."""
        self._factor = carriers[0].batch.rate

    def apply(self, scheduler: Scheduler) -> None:
        """Set the rate of the step that follows; the scheduler sets the next one anew. Raises
        ValueError if no batch was noted.
        """
        if self._factor is None:
            raise ValueError(
                "slime takes a step on a batch that its hooks did not see: set "
                "--rollout-data-postprocess-path trainer.slime.hooks.postprocess_hook"
            )
        for group in scheduler.optimizer.param_groups:
            group["lr"] = scheduler.get_lr(group) * self._factor
