"""Which versions of a run have weights, and where. Reads the run folder; starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opd.processes.remote_engine import absolute
from trainer.checkpoints.manifest import FILE_NAME, Manifest
from trainer.errors import CheckpointError, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWeights:
    """One version of the policy: 0 is the start model. `path` contains its weights, or an adapter
    of the model `adapts`.
    """

    version: int
    path: str
    adapts: str | None = None

    @property
    def label(self) -> str:
        """The label under which engines serve it."""
        return str(self.version)


def find_weights(folder: Path, model: str, name: str) -> VersionWeights:
    """The weights of version `name`: a number, "latest", or "start".

    Raises StartupError for a version that is unknown, deleted or damaged; the message names those
    that exist.
    """
    kept = versions_with_weights(folder)
    if name == "latest":
        version = max(kept, default=0)
    elif name == "start":
        version = 0
    elif name.isdecimal():
        version = int(name)
    else:
        raise StartupError(f"version '{name}': give a number, 'latest' or 'start'")
    if version == 0:
        return VersionWeights(version=0, path=absolute(model))
    path = _folder(folder, version)
    if version not in kept:
        is_pruned = (path / FILE_NAME).is_file()
        why = (
            "its weights were deleted (only the newest are kept)" if is_pruned else "never written"
        )
        there = ", ".join(["0 (start)", *map(str, kept)])
        raise StartupError(f"version {version}: {why}; in {folder} there are: {there}")
    _check(folder, model, path)
    has_adapter_alone = not (path / "config.json").is_file()
    return VersionWeights(
        version=version,
        path=str(path.resolve()),
        adapts=absolute(model) if has_adapter_alone else None,
    )


def versions_with_weights(folder: Path) -> list[int]:
    """The trained versions whose weights still exist, oldest first."""
    return sorted(
        int(path.parent.name.removeprefix("step_"))
        for path in (folder / "checkpoints").glob(f"step_*/{FILE_NAME}")
        if any(path.parent.glob("*.safetensors"))
    )


def _folder(folder: Path, version: int) -> Path:
    return folder / "checkpoints" / f"step_{version:06d}"


def _check(folder: Path, model: str, path: Path) -> None:
    from trainer.checkpoints.checkpoint import Checkpoints

    try:
        manifest = Manifest.read(path)
        Checkpoints(folder / "checkpoints", model, manifest.seed).verify(manifest)
    except CheckpointError as error:
        raise StartupError(f"a damaged checkpoint: {error}; give another version") from None
