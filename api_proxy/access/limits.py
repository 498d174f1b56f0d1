"""How much a key may ask for: requests and tokens a minute, tokens a day, replies at once.

Tokens are counted when they are known: those of a prompt before sampling, those of a reply at its
end. So a key is refused while it owes tokens, and can exceed its limit only by the replies that
were running. A day's usage is kept in the store (`Keys.add_usage`), so the quota holds across
restarts and, with the delay of a flush, across several proxies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from api_proxy.errors import ApiError, over_limit
from api_proxy.metrics import ProxyMetrics
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


@dataclass(slots=True)
class _Use:
    """What a key has used. `unsaved` are tokens by day that the store does not know of yet."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_running: int = 0
    unsaved: Counter[int] = field(default_factory=Counter)


class Limits:
    """The use of all keys of one application. `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float], metrics: ProxyMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._uses: dict[str, _Use] = {}
        self._saved: dict[tuple[str, int], int] = {}

    def request(self, key: ApiKey) -> None:
        """Count one more request. Raises ApiError 429 if the key has used up one of its limits."""
        use, limits, now = self._use(key), key.limits, self._clock()
        if limits.tokens_per_day is not None and self._today(key, now) >= limits.tokens_per_day:
            wait_s = DAY_S - now % DAY_S
            raise self._refusal("tokens_per_day", limits.tokens_per_day, wait_s)
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
        use, most = self._use(key), key.limits.max_concurrent
        if most is not None and use.num_running + size > most:
            raise self._refusal("max_concurrent", most, 1.0)
        use.num_running += size

    def end(self, key: ApiKey, size: int) -> None:
        """The replies that `begin` counted are over."""
        self._use(key).num_running -= size

    def used(self, key: ApiKey, num_tokens: int) -> None:
        """Count tokens of a prompt or a reply."""
        use, now = self._use(key), self._clock()
        if use.tokens is not None and key.limits.tokens_per_minute is not None:
            use.tokens.refill(key.limits.tokens_per_minute, now)
            use.tokens.level -= num_tokens
        use.unsaved[_day(now)] += num_tokens

    def unsaved(self) -> dict[tuple[str, int], int]:
        """(key id, day) -> tokens still to be added to the store's."""
        return {
            (key_id, day): number
            for key_id, use in self._uses.items()
            for day, number in use.unsaved.items()
            if number
        }

    def saved(self, added: dict[tuple[str, int], int], totals: dict[str, int], day: int) -> None:
        """The store has added these; `totals` are the day's tokens of all proxies, by key."""
        for (key_id, of_day), number in added.items():
            self._uses[key_id].unsaved[of_day] -= number
        self._saved = {(key_id, day): number for key_id, number in totals.items()}

    def today(self) -> int:
        """The number of the day (UTC)."""
        return _day(self._clock())

    def _today(self, key: ApiKey, now: float) -> int:
        day = _day(now)
        return self._saved.get((key.key_id, day), 0) + self._use(key).unsaved[day]

    def _use(self, key: ApiKey) -> _Use:
        return self._uses.setdefault(key.key_id, _Use())

    def _refusal(self, name: str, limit: int, wait_s: float) -> ApiError:
        self._metrics.limited.labels(name).inc()
        return over_limit(name, limit, max(math.ceil(wait_s), 1))


def _day(now: float) -> int:
    return int(now // DAY_S)
