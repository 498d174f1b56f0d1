"""How many bytes of request bodies are in memory at a time, over all connections.

A body counts from its first byte until its request is answered: what is made from it lives as long.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from api_proxy.config import ProxyConfig
from api_proxy.errors import bodies_too_large


class BodyBudget:
    """The bytes of one application; a tenant gets at most half of them."""

    def __init__(self, config: ProxyConfig) -> None:
        self._most = config.max_bytes_in_progress
        self._retry_after_s = config.retry_after_s
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def hold(self, scope: str) -> HeldBody:
        """The bytes that one request of this scope holds; use it as a context manager."""
        return HeldBody(self, scope)

    def add(self, scope: str, num_bytes: int) -> None:
        """Hold `num_bytes` more. Raises ApiError 429 or 503, and then holds none of them."""
        if self._held[scope] + num_bytes > self._most // 2:
            raise bodies_too_large(self._retry_after_s, is_own=True)
        if self.num_bytes + num_bytes > self._most:
            raise bodies_too_large(self._retry_after_s, is_own=False)
        self.num_bytes += num_bytes
        self._held[scope] += num_bytes

    def free(self, scope: str, num_bytes: int) -> None:
        """Release `num_bytes`."""
        self.num_bytes -= num_bytes
        self._held[scope] -= num_bytes
        if not self._held[scope]:
            del self._held[scope]


class HeldBody:
    """The bytes of one request, freed at the end of its context."""

    def __init__(self, budget: BodyBudget, scope: str) -> None:
        self._budget = budget
        self._scope = scope
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """More of the body came. Raises ApiError."""
        self._budget.add(self._scope, num_bytes)
        self._num_bytes += num_bytes

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.free(self._scope, self._num_bytes)
        self._num_bytes = 0
