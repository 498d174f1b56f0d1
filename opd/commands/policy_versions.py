"""The versions of a run: which there are, going back to one, and going on after a stop.

Reads manifests, and leaves orders that the trainer follows; it changes no checkpoint itself.
"""

from __future__ import annotations

import time
from pathlib import Path

from opd.run import config as run_config
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest, chain_to, withdrawn
from trainer.errors import CheckpointError, StartupError
from trainer.step.rollback_order import order_rollback
from trainer.step.stop_order import STOP_FILE, why_stopped


def list_versions(config_file: Path) -> str:
    """A line per version, oldest first: step, when, turns, lessons, weights, what became of it."""
    checkpoints, chain = _chain(config_file)
    gone = withdrawn(chain)
    lines = [f"{'version':>7} {'step':>5}  {'when':16} {'turns':>5} {'lessons':>7}  weights  "]
    for link in chain:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.created_at))
        kept = "kept" if checkpoints.has_weights(link.version) else "deleted"
        notes = [f"restores version {link.restores}"] if link.restores is not None else []
        notes += ["withdrawn"] if link.version in gone else []
        notes += ["newest"] if link is chain[-1] else []
        lines.append(
            f"{link.version:>7} {link.step:>5}  {when} {len(link.turn_ids):>5} "
            f"{len(link.lesson_ids):>7}  {kept:7}  {', '.join(notes)}".rstrip()
        )
    return "\n".join([lines[0].rstrip(), *lines[1:]])


def roll_back(config_file: Path, version: int) -> str:
    """Order the trainer to go back to `version`; returns a line on what happens next.

    Raises StartupError for a version that cannot be restored.
    """
    checkpoints, chain = _chain(config_file)
    try:
        checkpoints.source_of(version, chain)
    except CheckpointError as error:
        raise StartupError(f"--version: {error}") from error
    order_rollback(config_file.parent, version)
    return (
        f"rollback to version {version} is ordered: the trainer follows between two steps, or when "
        "the run starts"
    )


def resume(config_file: Path) -> str:
    """Take RUN/stop away. Raises StartupError where training is not stopped."""
    folder = config_file.parent
    reason = why_stopped(folder)
    if reason is None:
        raise StartupError(f"{folder}: training is not stopped")
    (folder / STOP_FILE).unlink(missing_ok=True)
    return f"training goes on; it had stopped: {reason}"


def _chain(config_file: Path) -> tuple[Checkpoints, list[Manifest]]:
    config = run_config.load(config_file)
    checkpoints = Checkpoints(config_file.parent / "checkpoints", config.model, config.trainer.seed)
    known: dict[int, Manifest] = {}
    try:
        for folder in checkpoints.root.glob("step_*"):
            manifest = Manifest.read(folder)
            known[manifest.version] = manifest
        if not known:
            raise StartupError(f"{checkpoints.root}: there are no versions yet")
        return checkpoints, chain_to(known[max(known)], known)
    except CheckpointError as error:
        raise StartupError(str(error)) from error
