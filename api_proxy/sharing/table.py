"""A bounded table in shared memory: from a text to a few bytes, for as long as there is room.

A key has its place in one of many buckets. In a full bucket, the entry that was written longest
ago makes room: whoever uses a table must be able to do without any of its entries.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api_proxy.sharing.memory import Memory

_HEAD = struct.Struct("<QH16s")
"""When it was written (monotonic ns; 0: free), bytes of the value, digest of the key."""
_FREE = bytes(8)
_DIGEST_BYTES = 16
_DIGEST_AT = _HEAD.size - _DIGEST_BYTES
_WAYS = 8
"""Entries of a bucket."""


@dataclass(slots=True)
class Cell:
    """The value of a key, None without one. What it is set to is written at the end of the
    block.
    """

    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a table is: `buckets` of eight entries, whose values have at most `value_bytes`."""

    buckets: int
    value_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Of an entry, aligned."""
        return (_HEAD.size + self.value_bytes + 7) // 8 * 8

    @property
    def num_bytes(self) -> int:
        """Of the whole table."""
        return self.buckets * _WAYS * self.entry_bytes


class Table:
    """The table at `start` of a memory."""

    def __init__(self, memory: Memory, start: int, shape: Shape) -> None:
        self._memory = memory
        self._start = start
        self._shape = shape

    def get(self, key: str) -> bytes | None:
        """The value of a key."""
        with self.held(key) as cell:
            return cell.value

    def put(self, key: str, value: bytes = b"") -> None:
        """Set it. Raises ValueError for a value that is too long."""
        with self.held(key) as cell:
            cell.value = value

    def add(self, key: str) -> bool:
        """Add a key without a value; returns whether it was missing."""
        with self.held(key) as cell:
            is_new = cell.value is None
            cell.value = b""
        return is_new

    def pop(self, key: str) -> bytes | None:
        """Remove a key; returns its value."""
        with self.held(key) as cell:
            value, cell.value = cell.value, None
        return value

    @contextmanager
    def held(self, key: str) -> Iterator[Cell]:
        """Read and change one value while no other process does; the block must not wait. If it
        raises, nothing changes.
        """
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        number = int.from_bytes(digest[:8]) % self._shape.buckets
        length = _WAYS * self._shape.entry_bytes
        bucket = self._start + number * length
        with self._memory.locked(bucket, length):
            place = self._place_of(digest, bucket)
            before = None if place is None else self._value_at(place)
            cell = Cell(before)
            yield cell
            if cell.value is None and place is not None:
                self._free(place)
            elif cell.value is not None and cell.value is not before:
                self._write(self._room(bucket) if place is None else place, digest, cell.value)

    def _place_of(self, digest: bytes, bucket: int) -> int | None:
        memory, size = self._memory.bytes, self._shape.entry_bytes
        end = bucket + _WAYS * size
        found = memory.find(digest, bucket, end)
        while found != -1:
            place = found - _DIGEST_AT
            if (place - bucket) % size == 0 and memory[place : place + 8] != _FREE:
                return place
            found = memory.find(digest, found + 1, end)
        return None

    def _value_at(self, place: int) -> bytes:
        _, length, _ = _HEAD.unpack_from(self._memory.bytes, place)
        begin = place + _HEAD.size
        return self._memory.bytes[begin : begin + length]

    def _room(self, bucket: int) -> int:
        """A free place, or that of the oldest entry."""
        size, memory = self._shape.entry_bytes, self._memory.bytes
        places = range(bucket, bucket + _WAYS * size, size)
        return min(places, key=lambda place: int.from_bytes(memory[place : place + 8], "little"))

    def _free(self, place: int) -> None:
        self._memory.bytes[place : place + 8] = _FREE

    def _write(self, place: int, digest: bytes, value: bytes) -> None:
        if len(value) > self._shape.value_bytes:
            raise ValueError(f"{len(value)} bytes do not fit {self._shape.value_bytes}")
        # In this order: a writer that is killed in the middle leaves a free place, not half an
        # entry.
        self._free(place)
        memory = self._memory.bytes
        memory[place + 8 : place + _HEAD.size] = _HEAD.pack(0, len(value), digest)[8:]
        memory[place + _HEAD.size : place + _HEAD.size + len(value)] = value
        memory[place : place + 8] = time.monotonic_ns().to_bytes(8, "little")
