"""Claims of turns that can still train, for the loop of a stage (`rollout_bridge.worker`).

Stands between the loop and the store. Every second it asks which turns can still train, lets go
those that wait and cannot, and claims among the others; a stage that works for hints alone, too,
gets the let go ones while it has nothing else to do. It knows no judge and no teacher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from records.names import DropReason, TurnState
from records.queue.freshness import Freshness, Horizon
from records.types import TurnRecord
from rollout_bridge.worker import ClaimStore

LOOK_EVERY_S = 1.0
"""Between two looks at what can still train."""


class FreshStore(ClaimStore, Protocol):
    """What is needed of the store."""

    async def claim(
        self,
        state: TurnState,
        *,
        owner: str,
        limit: int,
        ttl_s: float,
        oldest_version: int | None = None,
    ) -> list[TurnRecord]: ...
    async def claim_late(self, *, owner: str, limit: int, ttl_s: float) -> list[TurnRecord]: ...
    async def horizon(self, freshness: Freshness, latency_s: float | None) -> Horizon | None: ...
    async def let_go(self, state: TurnState, horizon: Horizon) -> int: ...
    async def waiting_for_s(self, state: TurnState) -> float | None: ...


class FreshClaims:
    """A `ClaimStore` that gives what can still train.

    `latency_s` says how long a turn that is begun now takes until it is ready; None: it is asked
    only what could not even train in the next step. `on_look` is told how many turns were let go,
    and for how many seconds the oldest waits, None without any. A turn that waits for its hint
    alone is given out only while half of `concurrency` stays free for what comes.
    """

    def __init__(
        self,
        store: FreshStore,
        freshness: Freshness,
        *,
        concurrency: int,
        takes_late: bool,
        latency_s: Callable[[], float] | None,
        on_look: Callable[[int, float | None], None],
    ) -> None:
        self._store, self._freshness = store, freshness
        self._kept_free = concurrency // 2
        self._takes_late, self._latency_s, self._on_look = takes_late, latency_s, on_look
        self._horizon: Horizon | None = None
        self._next_look_at = 0.0

    async def claim(
        self, state: TurnState, *, owner: str, limit: int, ttl_s: float
    ) -> list[TurnRecord]:
        """Claim up to `limit` turns; see `FreshClaims`."""
        await self._look(state)
        oldest = None if self._horizon is None else self._horizon.oldest_version
        turns = await self._store.claim(
            state, owner=owner, limit=limit, ttl_s=ttl_s, oldest_version=oldest
        )
        spare = limit - self._kept_free
        if turns or not self._takes_late or spare <= 0:
            return turns
        return await self._store.claim_late(owner=owner, limit=spare, ttl_s=ttl_s)

    async def _look(self, state: TurnState) -> None:
        now = time.monotonic()
        if now < self._next_look_at:
            return
        self._next_look_at = now + LOOK_EVERY_S
        latency_s = None if self._latency_s is None else self._latency_s()
        self._horizon = await self._store.horizon(self._freshness, latency_s)
        let_go = 0
        if self._horizon is not None:
            let_go = await self._store.let_go(state, self._horizon)
        self._on_look(let_go, await self._store.waiting_for_s(state))

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object:
        """As the store."""
        return await self._store.extend_claims(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """As the store."""
        return await self._store.release(owner, turn_ids)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """As the store."""
        return await self._store.drop(owner, turn_id, reason, detail)
