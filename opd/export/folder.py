"""A folder that appears only when it is complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import StartupError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, and is removed if anything is raised.

    Only its owner may read it. Raises StartupError if `out` exists and is not an empty folder,
    cannot be created, or if the disk is full.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StartupError(f"{out} exists: nothing is overwritten, name a new folder with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # In the same place, so that a single rename completes it.
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise StartupError(f"cannot write to {out.parent}: {error.strerror}") from error
    try:
        yield folder
        if out.exists():
            out.rmdir()
        folder.rename(out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise StartupError(f"cannot write {out}: {error.strerror or error}") from error
        raise
