"""A version of a run as a separate model folder: what `from_pretrained` and engines load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opd.evaluation.weights import VersionWeights, find_weights
from opd.run import config as run_config
from trainer.errors import StartupError


def export_version(config_file: Path, name: str, to: Path) -> str:
    """Write version `name` (a number, "latest" or "start") into the new folder `to`; returns a
    line on it.

    Raises StartupError for a version without weights, and for a folder that exists.
    """
    config = run_config.load(config_file)
    if to.exists():
        raise StartupError(f"--to {to}: it exists; name a new folder")
    if not to.parent.is_dir():
        raise StartupError(f"--to {to}: no folder {to.parent}")
    weights = find_weights(config_file.parent, config.model, name)
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        _write(weights, partial)
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    what = "its adapter merged into the start weights" if weights.adapts else "as it was trained"
    size = sum(path.stat().st_size for path in to.iterdir())
    return f"version {weights.version}, {what}: {to} ({size / 1e6:.1f} MB)"


def _write(weights: VersionWeights, folder: Path) -> None:
    source = Path(weights.path)
    if weights.adapts is not None:
        from trainer.publishing.merged import write_merged

        write_merged(weights.adapts, source, folder)
    elif weights.version > 0:
        folder.mkdir(mode=0o700)
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".pt" and path.name != "manifest.json":
                shutil.copyfile(path, folder / path.name)
    elif source.is_dir():
        shutil.copytree(source, folder)
    else:
        raise StartupError(f"--version start: it is {weights.path}, unchanged on the hub")
