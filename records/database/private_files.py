"""Files that contain what agents said are private to their owner.

Whoever starts a process of a run sets `UMASK`, so that everything it creates is private. Folders
are created with their mode, and what an earlier program left open is tightened when it is found. It
knows names and modes, not contents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

UMASK = 0o077
_OTHERS = 0o077
_FOLDER_MODE = 0o700
_MARKS = ("records.db", ".run-lock", ".trainer-lock", "engine.key", "engines.json")
"""What distinguishes a run folder from any other that a path may name by mistake."""
_OPENED = ("logs", "spill", "records.db-spill", "tensorboard", "checkpoints", "launch")
"""Folders of a run whose own entries are tightened too; below those, the folder's mode protects."""
_MOST_ENTRIES = 10_000


def private_folder(folder: Path) -> None:
    """Create a run folder, or tighten an existing one."""
    is_new = not folder.exists()
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    if is_new or not any(folder.iterdir()):
        _tighten(folder)
    else:
        tighten_run(folder)


def tighten_run(folder: Path) -> None:
    """Remove others' permissions from a run folder and its contents. Ignores any other folder."""
    if not any((folder / name).exists() for name in _MARKS):
        return
    _tighten(folder)
    _tighten_entries(folder)
    for name in _OPENED:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            _tighten_entries(folder / name)


def private_database(path: Path) -> None:
    """Make a SQLite file private before SQLite opens it: its log and index take its mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for suffix in ("", "-wal", "-shm"):
        _tighten(Path(f"{path}{suffix}"))


def _tighten_entries(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == _MOST_ENTRIES:
                logger.warning(
                    "%s: more than %d entries, the rest keep their modes", folder, number
                )
                return
            _tighten(Path(entry.path))


def _tighten(path: Path) -> None:
    """Never follows a link: its target does not belong to the run."""
    try:
        mode = path.lstat().st_mode
        if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and stat.S_IMODE(mode) & _OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    except FileNotFoundError:
        pass  # another process of the run removed it
    except OSError as error:
        logger.warning("%s: others may read it, and its mode cannot be changed: %s", path, error)
