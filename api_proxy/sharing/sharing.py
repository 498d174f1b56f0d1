"""All that the workers of an endpoint share, in one memory that ends with the last of them.

It is made by the process that starts the workers; each inherits its descriptor. An endpoint of one
process has the same in memory of its own. Nothing here is needed after a restart: what must be kept
is in the store.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

from api_proxy.sharing.memory import Memory
from api_proxy.sharing.table import Shape, Table

MOST_WORKERS = 64
SEAT_BYTES = 4
"""Of a key's running replies, for each worker (`access.limits`)."""

_SHAPES = {
    # Turns whose next state is on its way to the store, or just got there.
    "answered": Shape(buckets=2048, value_bytes=0),
    # What a prompt was linked to; sessions of first requests that got no answer.
    "asked": Shape(buckets=2048, value_bytes=128),
    "left": Shape(buckets=2048, value_bytes=128),
    # What keys have used, if they have limits.
    "uses": Shape(buckets=2048, value_bytes=4 * 8 + MOST_WORKERS * SEAT_BYTES),
    # Who is logged in to the pages, and the cookies of each key.
    "logins": Shape(buckets=512, value_bytes=256),
    "logins_of_key": Shape(buckets=64, value_bytes=50 * 32),
}
_LAYOUT = hashlib.blake2b(repr(_SHAPES).encode(), digest_size=16).digest()
_HEAD = struct.Struct("<16s32s")
"""Layout, random bytes."""
_COUNTER = struct.Struct("<Q")
_SEAT = struct.Struct("<dIIQ")
"""When the worker's oldest spilled record was made (0: none waits); whether it answers; how often
it was started; its connections.
"""
_COUNTER_AT = 64
_SEATS_AT = 128
_TABLES_AT = _SEATS_AT + MOST_WORKERS * _SEAT.size
_SIZE = _TABLES_AT + sum(shape.num_bytes for shape in _SHAPES.values())


class OtherProgram(Exception):
    """The memory was made by another version of this program."""


class Sharing:
    """What worker `number` (from 1; 0 for the process that starts them) of `workers` shares."""

    def __init__(self, memory: Memory, number: int = 1, workers: int = 1) -> None:
        self._memory = memory
        self.number = number
        self.workers = workers
        layout, self.secret = _HEAD.unpack_from(memory.bytes)
        if layout != _LAYOUT:
            raise OtherProgram("the program has changed since the endpoint was started: restart it")
        tables: dict[str, Table] = {}
        start = _TABLES_AT
        for name, shape in _SHAPES.items():
            tables[name] = Table(memory, start, shape)
            start += shape.num_bytes
        self.answered, self.asked, self.left = (
            tables[name] for name in ("answered", "asked", "left")
        )
        self.uses = tables["uses"]
        self.logins, self.logins_of_key = tables["logins"], tables["logins_of_key"]

    @classmethod
    def alone(cls) -> Sharing:
        """Of an endpoint of one process."""
        return cls(_filled(Memory(_SIZE)))

    @classmethod
    def create(cls, workers: int) -> Sharing:
        """For the process that starts the workers; they inherit `descriptor`."""
        return cls(_filled(Memory.shared(_SIZE)), 0, workers)

    @classmethod
    def join(cls, descriptor: int, number: int, workers: int) -> Sharing:
        """In a worker. Raises OtherProgram."""
        memory = Memory(_SIZE, descriptor)
        found = cls(memory, number, workers)
        _, _, life, _ = _SEAT.unpack_from(memory.bytes, _seat(number))
        struct.pack_into("<IIQ", memory.bytes, _seat(number) + 8, False, life + 1, 0)
        return found

    @property
    def descriptor(self) -> int:
        """Of memory that can be inherited."""
        assert self._memory.descriptor is not None, "the memory of an endpoint of one process"
        return self._memory.descriptor

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once for the whole endpoint."""
        return self.number == 1

    @property
    def num_forgotten(self) -> int:
        """How often sessions were deleted that some worker may remember."""
        return _COUNTER.unpack_from(self._memory.bytes, _COUNTER_AT)[0]

    def forget_sessions(self) -> None:
        """Let all workers ask the store for the names of sessions again."""
        with self._memory.locked(_COUNTER_AT, _COUNTER.size):
            _COUNTER.pack_into(self._memory.bytes, _COUNTER_AT, self.num_forgotten + 1)

    def answers(self, number: int) -> bool:
        """Whether that worker has begun to answer requests."""
        return bool(_SEAT.unpack_from(self._memory.bytes, _seat(number))[1])

    def set_answering(self, answers: bool) -> None:
        """Tell the process that starts the workers whether this one answers requests."""
        struct.pack_into("<I", self._memory.bytes, _seat(self.number) + 8, answers)

    def lives(self) -> list[int]:
        """How often each worker was started: what a killed one has counted is void. At most 65,535,
        then from 0 again.
        """
        return [
            _SEAT.unpack_from(self._memory.bytes, _seat(number))[2] % 2**16
            for number in range(1, self.workers + 1)
        ]

    def set_connections(self, number: int) -> None:
        """Tell the others how many connections this worker has."""
        struct.pack_into("<Q", self._memory.bytes, _seat(self.number) + 16, number)

    def fewest_connections(self) -> int | None:
        """Of the other workers that answer."""
        seats = (
            _SEAT.unpack_from(self._memory.bytes, _seat(number))
            for number in range(1, self.workers + 1)
            if number != self.number
        )
        return min((found for _, answers, _, found in seats if answers), default=None)

    def set_waiting_since(self, at: float | None) -> None:
        """Tell the others when the oldest record was made that this worker still keeps outside the
        store (unix seconds); None: it keeps none.
        """
        struct.pack_into("<d", self._memory.bytes, _seat(self.number), at or 0.0)

    def waiting_elsewhere(self) -> float | None:
        """When the oldest record was made that another worker keeps outside the store."""
        if self.workers == 1:
            return None
        others = (
            _SEAT.unpack_from(self._memory.bytes, _seat(number))[0]
            for number in range(1, self.workers + 1)
            if number != self.number
        )
        return min((at for at in others if at), default=None)


def process_name(number: int) -> str:
    """What a worker is called: in the names of its log and its metrics, and by its supervisor."""
    return "proxy" if number == 1 else f"proxy.{number}"


def _filled(memory: Memory) -> Memory:
    _HEAD.pack_into(memory.bytes, 0, _LAYOUT, secrets.token_bytes(32))
    return memory


def _seat(number: int) -> int:
    return _SEATS_AT + number * _SEAT.size - _SEAT.size
