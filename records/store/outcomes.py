"""The store's methods for outcomes of sessions: given by whoever knows, or by a verifier."""

from __future__ import annotations

from collections.abc import Sequence

from records.outcomes import outcomes, verifying
from records.outcomes.outcomes import KeptOutcome, NewOutcome
from records.outcomes.values import TurnValue, conversation
from records.outcomes.verifying import ToVerify
from records.store.base import StoreBase


class OutcomeStore(StoreBase):
    """Outcomes of sessions."""

    async def add_outcome(
        self,
        scope: str,
        value: float,
        reason: str | None,
        *,
        session: str | None = None,
        turn_id: str | None = None,
    ) -> KeptOutcome | None:
        """Keep an outcome that somebody gives for a session, named by its id, the client's name for
        it, or a turn of it; None if this scope has no such session.

        Raises ValueError for a number outside [0, 1], StoreConflict for a second, other outcome.
        """
        new = NewOutcome(
            scope=scope,
            value=value,
            reason=await self._clean(reason),
            now=self._clock(),
            session=session,
            turn_id=turn_id,
        )
        return await self.write(outcomes.add_outcome_op, new=new)

    async def session_of(
        self, scope: str, *, session: str | None = None, turn_id: str | None = None
    ) -> str | None:
        """The id of a session, named as in `add_outcome`; None if the scope has no such session."""
        return await self.read(outcomes.session_of, scope=scope, session=session, turn_id=turn_id)

    async def claim_sessions(
        self, owner: str, *, limit: int, idle_s: float, ttl_s: float
    ) -> list[ToVerify]:
        """Claim sessions that were quiet for `idle_s` and have a turn that can still train."""
        now = self._clock()
        if not await self.read(verifying.any_unverified, idle_before=now - idle_s, now=now):
            return []
        return await self.write(
            verifying.claim_sessions_op,
            owner=owner,
            limit=limit,
            idle_before=now - idle_s,
            now=now,
            ttl_s=ttl_s,
        )

    async def hold_sessions(
        self, owner: str, session_ids: Sequence[str], ttl_s: float | None
    ) -> int:
        """Hold these claims of `owner` for another `ttl_s`, or give them back (None); returns how
        many.
        """
        until = None if ttl_s is None else self._clock() + ttl_s
        return await self.write(
            verifying.set_claims_op, owner=owner, session_ids=session_ids, until=until
        )

    async def commit_outcome(
        self,
        owner: str,
        claimed: ToVerify,
        value: float,
        reason: str | None,
        values: Sequence[TurnValue] = (),
    ) -> bool:
        """Store the verifier's answer for a claimed session; False if the claim was lost, or the
        session went on meanwhile.
        """
        return await self.write(
            verifying.verified_op,
            owner=owner,
            claimed=claimed,
            value=value,
            reason=await self._clean(reason),
            now=self._clock(),
            values=values,
        )

    async def conversation(self, turn_id: str) -> list[str]:
        """The turns that led to this one, oldest first, with it."""
        return await self.read(conversation, turn_id=turn_id)

    async def give_up_outcome(self, owner: str, session_id: str, failure: str) -> bool:
        """Stop asking the verifier about a claimed session; False if the claim was lost."""
        said = await self._clean(failure)
        assert said is not None
        return await self.write(
            verifying.give_up_op, owner=owner, session_id=session_id, failure=said
        )

    async def _clean(self, reason: str | None) -> str | None:
        """A reason as it may be stored."""
        if reason is None:
            return None
        [message] = await self.redacted_messages([{"role": "feedback", "content": reason}])
        return message["content"]
