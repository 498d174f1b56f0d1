"""The checkpoints that slime's Megatron has written: their names, and which one it would load.

It reads no weights.
"""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the number of the newest checkpoint, written once that has all its shards.
It is the one that a job loads."""
_COMPLETE = "metadata.json"
"""Megatron writes it into a checkpoint last."""


def folder_name(rollout_id: int) -> str:
    """The folder of the checkpoint after a rollout; Megatron counts them as iterations."""
    return f"iter_{rollout_id:07d}"


def tracked_rollout(save_folder: Path) -> int:
    """The rollout of the checkpoint that a job loads; -1: there is none."""
    try:
        return int((save_folder / TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def saved_rollouts(save_folder: Path) -> list[int]:
    """The rollouts after which there is a whole checkpoint, up to the one that a job loads."""
    newest = tracked_rollout(save_folder)
    found = [
        int(path.parent.name.removeprefix("iter_"))
        for path in save_folder.glob(f"iter_[0-9]*/{_COMPLETE}")
    ]
    return sorted(one for one in found if one <= newest)
