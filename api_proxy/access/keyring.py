"""The API keys as the store had them a moment ago, and the caller of a request.

They are read again when a request finds them older than `key_refresh_s`, so a change takes effect
within that time. While the store does not answer, known keys keep working for at most
`key_grace_s`, and only the first request waits: agents get their answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from api_proxy.access.callers import Caller, anonymous_scope, credentials_of, tenant_scope
from api_proxy.config import ProxyConfig
from api_proxy.errors import invalid_key, no_key, store_unavailable
from records.errors import StoreError
from records.keys import ApiKey, Keys, parsed
from records.store import Store

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 3.0


class KeyRing:
    """The keys of one application. `clock` gives unix seconds."""

    def __init__(self, store: Store, config: ProxyConfig, clock: Callable[[], float]) -> None:
        self._source = Keys(store, clock)
        self._config = config
        self._clock = clock
        self._keys: dict[str, ApiKey] | None = None
        self._read_at = 0.0
        self._tried_at = 0.0
        self._answers = True
        self._reading: asyncio.Task[None] | None = None

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller who sends these headers. Raises ApiError 401, or 503 if the keys cannot be
        read.
        """
        keys = await self._current()
        text = credentials_of(headers)
        if not keys and self._config.is_loopback:
            return Caller(scope=anonymous_scope(text))
        if text is None:
            raise no_key()
        named = parsed(text)
        key = keys.get(named[0]) if named else None
        if named is None or key is None or not key.accepts(named[1], self._clock()):
            raise invalid_key()
        return Caller(scope=tenant_scope(key.tenant), key=key)

    async def has_keys(self) -> bool:
        """Whether requests need a key. Raises ApiError 503 if the keys cannot be read."""
        return bool(await self._current()) or not self._config.is_loopback

    async def caller_by_hash(self, key_id: str, secret_hash: bytes) -> Caller | None:
        """The caller with this key; None once it is revoked or has another secret.

        Raises ApiError 503 if the keys cannot be read.
        """
        key = (await self._current()).get(key_id)
        if key is None or not key.accepts_hash(secret_hash, self._clock()):
            return None
        return Caller(scope=tenant_scope(key.tenant), key=key)

    async def _current(self) -> dict[str, ApiKey]:
        if self._is_older(self._tried_at, self._config.key_refresh_s):
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self.read())
            if self._answers or self._keys is None:
                await asyncio.wait({self._reading})
        keys = self._keys
        # If there were no keys, none can have ended meanwhile.
        if keys is None or (keys and self._is_older(self._read_at, self._config.key_grace_s)):
            raise store_unavailable(self._config.retry_after_s)
        return keys

    async def read(self) -> None:
        """Ask the store; without an answer, the known keys stay."""
        asked_at = self._clock()
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                keys = await self._source.all()
        except (StoreError, TimeoutError) as error:
            logger.error("API keys not read; the known ones keep working: %s", type(error).__name__)
            self._answers = False
            self._tried_at = self._clock()
        else:
            self._keys = {key.key_id: key for key in keys}
            self._answers = True
            self._read_at = self._tried_at = asked_at

    def _is_older(self, at: float, age_s: float) -> bool:
        # A clock that was set back makes everything old, not eternally new.
        return not 0 <= self._clock() - at <= age_s
