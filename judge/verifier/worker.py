"""The verifier stage: a session that is over -> what it came to, committed to the store.

Runs beside the judge. Sessions are claimed as turns are; a verifier that fails is waited for with
the claim loop's patience (rollout_bridge/worker.py), and a session at which it alone fails is given
up, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import httpx
from prometheus_client import CollectorRegistry, Counter

from judge.verifier.calls import (
    InvalidOutcome,
    VerifierFailure,
    VerifierUnavailable,
    verify,
)
from judge.verifier.config import VerifierConfig
from records.names import DropReason
from records.outcomes.verifying import ToVerify
from records.types import TurnRecord
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)


class VerifierStore(Protocol):
    """What the verifier worker needs of the store."""

    async def claim_sessions(
        self, owner: str, *, limit: int, idle_s: float, ttl_s: float
    ) -> list[ToVerify]: ...
    async def hold_sessions(
        self, owner: str, session_ids: Sequence[str], ttl_s: float | None
    ) -> int: ...
    async def commit_outcome(
        self, owner: str, claimed: ToVerify, value: float, reason: str | None
    ) -> bool: ...
    async def give_up_outcome(self, owner: str, session_id: str, failure: str) -> bool: ...
    async def turn(self, turn_id: str) -> TurnRecord | None: ...


class VerifierMetrics:
    """Counters of one verifier worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.outcomes = Counter(
            "verifier_outcomes",
            "Sessions whose outcome the verifier reported",
            registry=self.registry,
        )
        self.sum = Counter("verifier_outcome_sum", "Their outcomes, summed", registry=self.registry)
        self.failures = Counter(
            "verifier_failures",
            "Calls without an outcome, by reason",
            ["reason"],
            registry=self.registry,
        )
        for reason in VerifierFailure:
            self.failures.labels(reason=reason.value)
        self.given_up = Counter(
            "verifier_given_up", "Sessions at which the verifier failed", registry=self.registry
        )


class SessionClaims:
    """The store's sessions under the names by which the claim loop asks for turns."""

    def __init__(self, store: VerifierStore, idle_s: float) -> None:
        self._store, self._idle_s = store, idle_s

    async def claim(self, state: None, *, owner: str, limit: int, ttl_s: float) -> list[ToVerify]:
        """Claim up to `limit` sessions that are over."""
        return await self._store.claim_sessions(
            owner, limit=limit, idle_s=self._idle_s, ttl_s=ttl_s
        )

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object:
        """Hold claims for longer."""
        return await self._store.hold_sessions(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """Give claims back."""
        return await self._store.hold_sessions(owner, turn_ids, None)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """A claimed session is not asked about again."""
        failure = f"{reason.value}: {detail}" if detail else reason.value
        return await self._store.give_up_outcome(owner, turn_id, failure)


class VerifierWorker:
    """Asks the verifier about sessions until stopped. `owner` names the claims."""

    def __init__(self, store: VerifierStore, config: VerifierConfig, owner: str) -> None:
        self._store, self._config, self._owner = store, config, owner
        self.metrics = VerifierMetrics()
        claims = SessionClaims(store, config.idle_s)
        self.loop: ClaimLoop[ToVerify] = ClaimLoop(claims, self, owner=owner, config=config.loop)
        self._client: httpx.AsyncClient | None = None

    @property
    def state(self) -> None:
        """Sessions have none."""
        return None

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until `stop` is set. See `ClaimLoop.run`."""
        async with httpx.AsyncClient() as client:
            self._client = client
            await self.loop.run(stop)

    async def process(self, turn: ToVerify, /) -> None:
        """Ask about one session and commit. Raises VerifierUnavailable."""
        assert self._client is not None, "process is called by run"
        last = await self._store.turn(turn.last_turn_id)
        if last is None:  # deleted meanwhile
            return
        try:
            said = await verify(self._config, as_session(turn, last), self._client)
        except InvalidOutcome as error:
            self.metrics.failures.labels(VerifierFailure.INVALID.value).inc()
            await self._give_up(turn, f"{VerifierFailure.INVALID.value}: {error}")
            return
        except VerifierUnavailable as error:
            self.metrics.failures.labels(error.failure.value).inc()
            raise
        if await self._store.commit_outcome(self._owner, turn, said.outcome, said.reason):
            self.metrics.outcomes.inc()
            self.metrics.sum.inc(said.outcome)
        else:
            logger.info("session %s: it went on, or its outcome is known", turn.session_id)

    async def give_up(self, turn: ToVerify, error: ServiceUnavailable, /) -> None:
        """A session about which the verifier never gave an answer."""
        await self._give_up(turn, str(error))

    async def _give_up(self, turn: ToVerify, failure: str) -> None:
        if await self._store.give_up_outcome(self._owner, turn.session_id, failure):
            self.metrics.given_up.inc()
            # Why may hold what users said: it lies with the session.
            logger.warning(
                "session %s has no outcome: the verifier failed at it (opd doctor says why)",
                turn.session_id,
            )


def as_session(session: ToVerify, last: TurnRecord) -> dict[str, Any]:
    """What a verifier gets: the conversation as its last answer was asked for, and that answer."""
    return {
        "session_id": session.session_id,
        "name": session.name,
        "messages": [*last.messages, last.response],
        "tools": list(last.tools),
    }
