"""Files of a checkpoint with their sizes and hashes, taken while they are written.

What passes through `save` is never read again. Weights that a library writes by itself are hashed
in a thread, from the page cache, while the next files are written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import torch

from trainer.checkpoints.manifest import FileEntry


class HashedFiles:
    """The files of one folder. As a context manager it waits for its thread on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._entries: dict[str, FileEntry | Future[FileEntry]] = {}

    def __enter__(self) -> HashedFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def save(self, value: Any, name: str) -> None:
        """Write a value as torch does, and sync it."""
        with (self._folder / name).open("wb") as file:
            writer = _HashingWriter(file)
            torch.save(value, cast("IO[bytes]", writer))
            file.flush()
            os.fsync(file.fileno())
        self._entries[name] = FileEntry(size=writer.size, sha256=writer.digest.hexdigest())

    def take(self, paths: Iterable[Path]) -> None:
        """Sync and hash, in the thread, files that are already there."""
        for path in paths:
            self._entries[path.name] = self._thread.submit(_entry, path)

    def entries(self) -> dict[str, FileEntry]:
        """All of them, by name."""
        found = {
            name: entry.result() if isinstance(entry, Future) else entry
            for name, entry in self._entries.items()
        }
        return dict(sorted(found.items()))


class _HashingWriter:
    """What torch.save needs of a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def sha256(path: Path) -> str:
    """Hex hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> FileEntry:
    sync(path)
    return FileEntry(size=path.stat().st_size, sha256=sha256(path))
