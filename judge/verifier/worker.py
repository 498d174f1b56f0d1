"""The verifier stage: a session that is over -> its outcome, committed to the store.

Runs alongside the judge. Sessions are claimed like turns. A verifier that fails is waited for with
the claim loop's patience (rollout_bridge/worker.py); if it fails only at one session, that session
is given up, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import httpx
from prometheus_client import CollectorRegistry, Counter

from judge.verifier.calls import (
    InvalidOutcome,
    Said,
    VerifierFailure,
    VerifierUnavailable,
    verify,
)
from judge.verifier.config import VerifierConfig
from judge.verifier.values import Continues, as_session, turn_value
from records.messages import Message
from records.names import DropReason
from records.outcomes.values import TurnValue
from records.outcomes.verifying import ToVerify
from records.types import TurnRecord
from rollout_bridge.worker import ClaimLoop, ServiceUnavailable

logger = logging.getLogger(__name__)


class VerifierStore(Protocol):
    """What the verifier worker needs from the store."""

    async def claim_sessions(
        self, owner: str, *, limit: int, idle_s: float, ttl_s: float
    ) -> list[ToVerify]: ...
    async def hold_sessions(
        self, owner: str, session_ids: Sequence[str], ttl_s: float | None
    ) -> int: ...
    async def commit_outcome(
        self,
        owner: str,
        claimed: ToVerify,
        value: float,
        reason: str | None,
        values: Sequence[TurnValue] = (),
    ) -> bool: ...
    async def conversation(self, turn_id: str) -> list[str]: ...
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
        self.sum = Counter(
            "verifier_outcome_sum",
            "Outcomes that the verifier reported, summed",
            registry=self.registry,
        )
        self.continuations = Counter(
            "verifier_continuations",
            "Further answers to prompts of sessions that the verifier judged",
            registry=self.registry,
        )
        self.failures = Counter(
            "verifier_failures",
            "Calls without an outcome, by reason",
            ["reason"],
            registry=self.registry,
        )
        for reason in VerifierFailure:
            self.failures.labels(reason=reason.value)
        self.given_up = Counter(
            "verifier_given_up",
            "Sessions given up because the verifier failed",
            registry=self.registry,
        )


class SessionClaims:
    """The store's sessions, with the methods by which the claim loop claims turns."""

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
        """Give up a claimed session: it is not asked about again."""
        failure = f"{reason.value}: {detail}" if detail else reason.value
        return await self._store.give_up_outcome(owner, turn_id, failure)


class VerifierWorker:
    """Asks the verifier about sessions until stopped. `owner` names the claims."""

    def __init__(
        self,
        store: VerifierStore,
        config: VerifierConfig,
        owner: str,
        policy: Continues,
    ) -> None:
        self._store, self._config, self._owner = store, config, owner
        self._policy = policy
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
        """Ask about one session, and what its turns were worth, and commit. Raises
        ServiceUnavailable.
        """
        last = await self._store.turn(turn.last_turn_id)
        if last is None:  # deleted meanwhile
            return
        try:
            said = await self._ask(turn, last, [*last.messages, last.response])
            values = await self._values(turn)
        except InvalidOutcome as error:
            self.metrics.failures.labels(VerifierFailure.INVALID.value).inc()
            await self._give_up(turn, f"{VerifierFailure.INVALID.value}: {error}")
            return
        except VerifierUnavailable as error:
            self.metrics.failures.labels(error.failure.value).inc()
            raise
        if await self._store.commit_outcome(self._owner, turn, said.outcome, said.reason, values):
            self.metrics.continuations.inc(sum(one.tries for one in values))
            self.metrics.outcomes.inc()
            self.metrics.sum.inc(said.outcome)
        else:
            logger.info("session %s: it went on, or its outcome is already known", turn.session_id)

    async def _ask(self, session: ToVerify, turn: TurnRecord, messages: list[Message]) -> Said:
        assert self._client is not None, "process is called by run"
        asked = as_session(session.session_id, session.name, messages, turn.tools)
        return await verify(self._config, asked, self._client)

    async def _ask_of_try(
        self, session: ToVerify, turn: TurnRecord, messages: list[Message]
    ) -> float | None:
        """The outcome of a further answer; None if the verifier gives none, which must not cost
        the session its own.
        """
        try:
            return (await self._ask(session, turn, messages)).outcome
        except InvalidOutcome:
            self.metrics.failures.labels(VerifierFailure.INVALID.value).inc()
        except VerifierUnavailable as error:
            self.metrics.failures.labels(error.failure.value).inc()
        return None

    async def _values(self, session: ToVerify) -> list[TurnValue]:
        """Of the turns that led to the session's end, one after the other."""
        tries = self._config.continuations
        if not tries:
            return []
        found = []
        for turn_id in await self._store.conversation(session.last_turn_id):
            turn = await self._store.turn(turn_id)
            if turn is not None:  # else deleted meanwhile
                ask = partial(self._ask_of_try, session, turn)
                found.append(await turn_value(turn, tries, self._policy, ask))
        return found

    async def give_up(self, turn: ToVerify, error: ServiceUnavailable, /) -> None:
        """Give up a session about which the verifier never gave an answer."""
        await self._give_up(turn, str(error))

    async def _give_up(self, turn: ToVerify, failure: str) -> None:
        if await self._store.give_up_outcome(self._owner, turn.session_id, failure):
            self.metrics.given_up.inc()
            # The reason may contain what users said, so it is stored with the session instead.
            logger.warning(
                "session %s has no outcome: the verifier failed at it (opd doctor shows why)",
                turn.session_id,
            )
