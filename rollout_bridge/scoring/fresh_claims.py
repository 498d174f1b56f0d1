"""Claims of turns that can still train, for the loop of a stage (`rollout_bridge.worker`).

It sits between the loop and the store. Every second it checks which turns can still train, lets go
of waiting ones that cannot, and claims from the others. A stage that can also work for the hint
alone gets those it let go of while it has nothing else to do. It knows no judge and no teacher.
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
"""Time between two checks of what can still train."""


class FreshStore(ClaimStore, Protocol):
    """What is needed from the store."""

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
    """A `ClaimStore` that gives out turns that can still train.

    `latency_s` returns how long a turn that starts now takes until it is ready; None: only turns
    that could not even train in the next step are let go of. `on_look` gets how many turns were let
    go of, and for how many seconds the oldest has waited, None without any. A turn that only needs
    its hint is given out only while half of `concurrency` stays free for new turns.
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
        """Same as the store's."""
        return await self._store.extend_claims(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """Same as the store's."""
        return await self._store.release(owner, turn_ids)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """Same as the store's."""
        return await self._store.drop(owner, turn_id, reason, detail)
