"""Files next to the database that keep what it could not take, until it can.

One file for each writing process, locked as long as that process lives: the kernel frees the lock
when it dies, so whoever gets the lock knows that the owner is gone. A file is reserved in advance,
so that a full disk still has room for it. Records carry their length and a checksum and are synced
before `append` returns; what a crash cut off at the end is recognised. Records are found by their
lengths alone, never by searching: their content comes from users, and may look like a record.

It knows bytes and times, but not what they mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from records.errors import StoreUnavailable

logger = logging.getLogger(__name__)

SUFFIX = ".spill"
_MAGIC = b"OPDS"
_HEADER = struct.Struct("<4sQd16s")
"""Magic, bytes of the payload, unix seconds, digest of the three."""
_DIGEST_BYTES = 16
_ZEROS = bytes(2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillRecord:
    """One record: when it was written (unix seconds), its payload, where it ends in the file."""

    at: float
    payload: bytes
    end: int


class SpillFile:
    """One file, locked by this process. Not for use by several threads at once."""

    def __init__(self, path: Path, descriptor: int, reserve_bytes: int = 0) -> None:
        self.path = path
        self._descriptor = descriptor
        self._reserve_bytes = reserve_bytes
        self.end = 0
        """Where the next record goes."""
        self.is_torn = False
        """Whether the last record that `read` found was cut off."""
        self._damaged: set[int] = set()
        self._refused: set[int] = set()

    @classmethod
    def create(cls, folder: Path, reserve_bytes: int) -> SpillFile:
        """A new file in `folder`, with room for `reserve_bytes`. Raises StoreUnavailable."""
        name = f"{time.time_ns():020d}-{os.getpid()}"
        hidden = folder / f"{name}.new"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(hidden, flags, 0o600)
            # Locked under a name that no process looks for: an empty file of a dead owner is
            # removed.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if reserve_bytes:
                os.posix_fallocate(descriptor, 0, reserve_bytes)
            os.fsync(descriptor)
            path = folder / f"{name}{SUFFIX}"
            os.rename(hidden, path)
            _sync_folder(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise StoreUnavailable(
                f"no room to keep what the database may refuse: {folder}: {error.strerror}; "
                "free the disk, or set store.spill_folder"
            ) from error
        return cls(path, descriptor, reserve_bytes)

    @classmethod
    def orphan(cls, path: Path) -> SpillFile | None:
        """The file of a process that is gone; None if it lives, or another took the file."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if not os.fstat(descriptor).st_nlink:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    @property
    def num_damaged(self) -> int:
        """Places where `read` found something that is not a record, except a last record that is
        cut off.
        """
        return len(self._damaged)

    @property
    def num_refused(self) -> int:
        """Whole records that this program or the store cannot use."""
        return len(self._refused)

    @property
    def is_spent(self) -> bool:
        """Whether all that `read` found is in the store now, so that the file may be deleted."""
        return not (self._damaged or self._refused)

    def refuse(self, record: SpillRecord) -> None:
        """Note that this program can never take this record in: the file has to be kept."""
        self._refused.add(record.end)

    def append(self, at: float, payload: bytes) -> None:
        """Write a record and sync it. Raises OSError; the record is then not in the file."""
        digest = _digest(at, payload)
        data = _HEADER.pack(_MAGIC, len(payload), at, digest) + payload
        try:
            _write(self._descriptor, data, self.end)
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                written = os.fstat(self._descriptor).st_size - self.end
                self._blank(self.end, min(len(data), written))
            raise
        self.end += len(data)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[SpillRecord]:
        """The records from `start` on (to `stop`); after that, `is_torn` and `num_damaged` are
        valid. Reading again counts nothing twice.
        """
        position, is_bad = start, False
        size = os.fstat(self._descriptor).st_size
        while position != stop:
            header = os.pread(self._descriptor, _HEADER.size, position)
            if not header.strip(b"\0"):
                break
            if len(header) < _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
                is_bad = True
                begins = header[: len(_MAGIC)].rstrip(b"\0")
                if not _MAGIC.startswith(begins):
                    # Not a torn write: where the next record would be is unknown.
                    self._damaged.add(position)
                break
            _, length, at, digest = _HEADER.unpack(header)
            end = position + _HEADER.size + length
            if end > size:
                is_bad = True
                break
            # Anything after a bad record was written later: the bad record was the last one only if
            # nothing follows.
            if is_bad:
                self._damaged.add(position)
            payload = os.pread(self._descriptor, length, position + _HEADER.size)
            is_bad = _digest(at, payload) != digest
            position = end
            if not is_bad:
                yield SpillRecord(at=at, payload=payload, end=position)
        self.is_torn = is_bad

    def clear(self) -> None:
        """Forget all records; their space stays reserved, their content is overwritten."""
        used = self.end
        self._blank(0, _HEADER.size)
        os.fsync(self._descriptor)
        self._blank(0, used)
        if used > self._reserve_bytes:
            os.ftruncate(self._descriptor, max(self._reserve_bytes, _HEADER.size))
        os.fsync(self._descriptor)
        self.end = 0

    def _blank(self, start: int, length: int) -> None:
        for offset in range(0, length, len(_ZEROS)):
            _write(self._descriptor, _ZEROS[: length - offset], start + offset)

    def remove(self) -> None:
        """Delete the file. If it contains what is not in the store, keep it under another name."""
        if self.is_spent:
            self.path.unlink(missing_ok=True)
        else:
            if self.end:
                os.ftruncate(self._descriptor, self.end)
            kept = self.path.with_suffix(".damaged")
            os.rename(self.path, kept)
            logger.error(
                "%d records are damaged, %d were refused; kept for inspection: %s",
                self.num_damaged,
                self.num_refused,
                kept,
            )
        self.close()

    def close(self) -> None:
        """Give up the lock; what is in the file is for the next process."""
        os.close(self._descriptor)


def orphans(folder: Path, own: Path | None = None) -> list[SpillFile]:
    """The files of processes that are gone, oldest first, locked for the caller."""
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if path != own)
    return [file for path in files if (file := SpillFile.orphan(path)) is not None]


def waiting_files(folder: Path) -> list[Path]:
    """Files with at least one record, of living and dead processes."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _has_records(path)]


def withdraw(folder: Path, is_unwanted: Callable[[bytes], bool]) -> tuple[int, list[Path]]:
    """Remove records from the files of processes that are gone.

    Returns how many were removed, and the files of living processes that have records.
    """
    num_withdrawn = 0
    for file in orphans(folder):
        kept: list[SpillRecord] = []
        records = list(file.read())
        for record in records:
            if is_unwanted(record.payload):
                num_withdrawn += 1
            else:
                kept.append(record)
        if len(kept) == len(records):
            file.close()
            continue
        if kept:
            successor = SpillFile.create(folder, 0)
            for record in kept:
                successor.append(record.at, record.payload)
            successor.close()
        # A crash before this leaves records twice, which does no harm when they are taken in.
        file.path.unlink()
        file.close()
    living = [path for path in waiting_files(folder) if not _is_orphan(path)]
    return num_withdrawn, living


def _is_orphan(path: Path) -> bool:
    file = SpillFile.orphan(path)
    if file is not None:
        file.close()
    return file is not None


def _has_records(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except FileNotFoundError:
        return False


def _digest(at: float, payload: bytes) -> bytes:
    head = struct.pack("<Qd", len(payload), at)
    return hashlib.blake2b(head + payload, digest_size=_DIGEST_BYTES).digest()


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
