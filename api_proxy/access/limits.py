"""How much a key may ask for: requests and tokens a minute, tokens a day, replies at once.

Tokens are counted when they are known: those of a prompt before sampling, those of a reply at its
end. So a key is refused while it owes tokens, and can exceed its limit only by the replies that
were running. All of this is counted once for all workers of an endpoint (`sharing`). A day's usage
is kept in the store (`Keys.add_usage`), so the quota holds across restarts and, with the delay of a
flush, across workers and several proxies.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api_proxy.errors import ApiError, over_limit
from api_proxy.metrics import ProxyMetrics
from api_proxy.sharing.sharing import MOST_WORKERS, Sharing
from records.keys import ApiKey

DAY_S = 86_400


@dataclass(slots=True)
class Bucket:
    """What may be used: `level` of at most `limit`, and `limit` more each minute.

    It may owe: a `level` below 0.
    """

    level: float
    at: float

    def refill(self, limit: int, now: float) -> None:
        """Let time pass."""
        passed_s = max(now - self.at, 0.0)
        self.level = min(self.level + limit * passed_s / 60, limit)
        self.at = now

    def wait_s(self, limit: int, wanted: float) -> float:
        """Seconds until `wanted` is available."""
        return max((wanted - self.level) * 60 / limit, 0.0)


_USE = struct.Struct(f"<4d{2 * MOST_WORKERS}H")


@dataclass(slots=True)
class _Use:
    """What all workers have let a key use; `running` are the replies of each worker, and in which
    of its lives it has counted them.
    """

    requests: Bucket | None
    tokens: Bucket | None
    running: list[tuple[int, int]]

    @classmethod
    def of(cls, packed: bytes | None) -> _Use:
        """What was packed, or the use of a key that has used nothing."""
        if packed is None:
            return cls(None, None, [(0, 0)] * MOST_WORKERS)
        level, at, token_level, token_at, *running = _USE.unpack(packed)
        counted = list(zip(running[::2], running[1::2], strict=True))
        return cls(_bucket(level, at), _bucket(token_level, token_at), counted)

    def packed(self) -> bytes:
        """For the memory that workers share."""
        levels = (
            value
            for one in (self.requests, self.tokens)
            for value in ((math.nan, math.nan) if one is None else (one.level, one.at))
        )
        return _USE.pack(*levels, *(number for pair in self.running for number in pair))


def _bucket(level: float, at: float) -> Bucket | None:
    return None if math.isnan(level) else Bucket(level, at)


class Limits:
    """The use of all keys of one endpoint. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float], metrics: ProxyMetrics, sharing: Sharing) -> None:
        self._clock = clock
        self._metrics = metrics
        self._uses = sharing.uses
        self._sharing = sharing
        self._run_here: Counter[str] = Counter()
        self._unsaved: Counter[tuple[str, int]] = Counter()
        """Tokens by key and day that the store does not know of yet."""
        self._saved: dict[tuple[str, int], int] = {}

    def request(self, key: ApiKey) -> None:
        """Count one more request. Raises ApiError 429 if the key has used up one of its limits."""
        limits, now = key.limits, self._clock()
        if limits.tokens_per_day is not None and self._today(key, now) >= limits.tokens_per_day:
            wait_s = DAY_S - now % DAY_S
            raise self._refusal("tokens_per_day", limits.tokens_per_day, wait_s)
        if limits.tokens_per_minute is None and limits.requests_per_minute is None:
            return
        with self._use(key) as use:
            if limits.tokens_per_minute is not None:
                bucket = use.tokens = use.tokens or Bucket(limits.tokens_per_minute, now)
                bucket.refill(limits.tokens_per_minute, now)
                if bucket.level <= 0:
                    wait_s = bucket.wait_s(limits.tokens_per_minute, 1)
                    raise self._refusal("tokens_per_minute", limits.tokens_per_minute, wait_s)
            if limits.requests_per_minute is not None:
                bucket = use.requests = use.requests or Bucket(limits.requests_per_minute, now)
                bucket.refill(limits.requests_per_minute, now)
                if bucket.level < 1:
                    wait_s = bucket.wait_s(limits.requests_per_minute, 1)
                    raise self._refusal("requests_per_minute", limits.requests_per_minute, wait_s)
                bucket.level -= 1

    def begin(self, key: ApiKey, size: int) -> None:
        """Count `size` more replies; whoever begins must end. Raises ApiError 429."""
        most = key.limits.max_concurrent
        if most is not None:
            with self._use(key) as use:
                running = self._count_here(use, self._run_here[key.key_id] + size)
                if running > most:
                    raise self._refusal("max_concurrent", most, 1.0)
        self._run_here[key.key_id] += size

    def end(self, key: ApiKey, size: int) -> None:
        """The replies that `begin` counted are over."""
        self._run_here[key.key_id] -= size
        if key.limits.max_concurrent is not None:
            with self._use(key) as use:
                self._count_here(use, self._run_here[key.key_id])
        if not self._run_here[key.key_id]:
            del self._run_here[key.key_id]

    def used(self, key: ApiKey, num_tokens: int) -> None:
        """Count tokens of a prompt or a reply."""
        now, limit = self._clock(), key.limits.tokens_per_minute
        if limit is not None:
            with self._use(key) as use:
                if use.tokens is not None:
                    use.tokens.refill(limit, now)
                    use.tokens.level -= num_tokens
        self._unsaved[key.key_id, _day(now)] += num_tokens

    def unsaved(self) -> dict[tuple[str, int], int]:
        """(key id, day) -> tokens still to be added to the store's."""
        return {of: number for of, number in self._unsaved.items() if number}

    def saved(self, added: dict[tuple[str, int], int], totals: dict[str, int], day: int) -> None:
        """The store has added these; `totals` are the day's tokens of all proxies, by key."""
        self._unsaved.subtract(added)
        self._unsaved = +self._unsaved
        self._saved = {(key_id, day): number for key_id, number in totals.items()}

    def today(self) -> int:
        """The number of the day (UTC)."""
        return _day(self._clock())

    def _today(self, key: ApiKey, now: float) -> int:
        of = key.key_id, _day(now)
        return self._saved.get(of, 0) + self._unsaved[of]

    def _count_here(self, use: _Use, number: int) -> int:
        """Set how many replies run here; returns how many run in all workers."""
        lives = self._sharing.lives()
        seat = self._sharing.number - 1
        use.running[seat] = (number, lives[seat])
        counted = zip(use.running, lives, strict=False)
        return sum(number for (number, life), now in counted if life == now)

    @contextmanager
    def _use(self, key: ApiKey) -> Iterator[_Use]:
        """What the key has used, changed for all workers at the end of the block."""
        with self._uses.held(key.key_id) as cell:
            use = _Use.of(cell.value)
            yield use
            cell.value = use.packed()

    def _refusal(self, name: str, limit: int, wait_s: float) -> ApiError:
        self._metrics.limited.labels(name).inc()
        return over_limit(name, limit, max(math.ceil(wait_s), 1))


def _day(now: float) -> int:
    return int(now // DAY_S)
