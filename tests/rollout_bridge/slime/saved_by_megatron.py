"""Checkpoint folders as slime's Megatron leaves them, without weights."""

from __future__ import annotations

from pathlib import Path

from rollout_bridge.slime.saved import TRACKER, folder_name


def saves(folder: Path, *rollouts: int) -> None:
    """Whole checkpoints after these rollouts; the last one is the one to load."""
    for rollout_id in rollouts:
        starts_to_save(folder, rollout_id)
        (folder / folder_name(rollout_id) / "metadata.json").write_text("{}")
        (folder / TRACKER).write_text(str(rollout_id))


def starts_to_save(folder: Path, rollout_id: int) -> None:
    """A checkpoint that a killed job left unfinished."""
    path = folder / folder_name(rollout_id)
    path.mkdir(parents=True, exist_ok=True)
    (path / "common.pt").write_bytes(b"weights")
