"""Who may work in a run folder: one command, and one trainer, at a time.

Both are locks on files that the kernel releases when their process dies. A command that finds the
folder taken ends with one line. A trainer waits: that of a killed run may still be taking its last
step.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from records.database.private_files import private_folder
from trainer.errors import StartupError

logger = logging.getLogger(__name__)

RUN_LOCK, TRAINER_LOCK = ".run-lock", ".trainer-lock"
_WAIT_S = 240.0
_POLL_S = 0.1


class RunFolderTaken(StartupError):
    """Another process works in this run folder."""


@contextmanager
def only_command(folder: Path) -> Iterator[None]:
    """Keep `folder` for this command. Raises RunFolderTaken, at once."""
    with _opened(folder / RUN_LOCK) as descriptor:
        if not _taken(descriptor):
            raise RunFolderTaken(
                f"{folder}: a run is at work here; stop it first, or use another folder "
                f"(--run), or hand recordings to it (opd replay ... --into {folder})"
            )
        yield


@contextmanager
def starting_in(folder: Path) -> Iterator[None]:
    """Create `folder` if it does not exist, and keep it for this command.

    A failed start leaves no new folder behind.
    """
    is_new = not folder.exists()
    private_folder(folder)
    try:
        with only_command(folder):
            yield
    except Exception:
        if is_new and [one.name for one in folder.iterdir()] == [RUN_LOCK]:
            (folder / RUN_LOCK).unlink()
            folder.rmdir()
        raise


@asynccontextmanager
async def only_trainer(folder: Path, wait_s: float = _WAIT_S) -> AsyncIterator[None]:
    """Keep the training of `folder` for this process. Raises RunFolderTaken after `wait_s`."""
    deadline = time.monotonic() + wait_s
    with _opened(folder / TRAINER_LOCK) as descriptor:
        if not _taken(descriptor):
            logger.info("another trainer of this run is still at work: waiting for its end")
            while not _taken(descriptor):
                if time.monotonic() > deadline:
                    raise RunFolderTaken(
                        f"{folder}: another trainer works here and did not end within "
                        f"{wait_s:.0f} s; stop it, then start this one again"
                    )
                await asyncio.sleep(_POLL_S)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Not inherited: a child that outlives its parent must not keep its parent's lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
