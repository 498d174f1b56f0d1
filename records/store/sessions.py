"""The store's methods with which the proxy finds the turn that a request continues."""

from __future__ import annotations

from collections.abc import Sequence

from records.messages import Message
from records.store.base import StoreBase
from records.turns import linking, sessions
from records.types import TurnRef

_IDLE_SESSIONS_PER_TRANSACTION = 200


class SessionStore(StoreBase):
    """Sessions, and the turns that a request may continue."""

    async def ensure_session(
        self, *, scope: str, external_id: str | None, session_id: str | None = None
    ) -> str:
        """The id of a session, created if needed, and noted as seen (and open) now.

        `external_id` is the client's name for it, `session_id` ours; with neither, it is a new
        session. Raises ValueError for a session of another scope.
        """
        if external_id is not None:
            session_id = await self.read(
                sessions.find_external, scope=scope, external_id=external_id
            )
        if session_id is not None:
            found = await self.read(sessions.find, session_id=session_id)
            if found is not None and found[0] != scope:
                raise ValueError(f"session {session_id!r} belongs to another scope")
            if found is not None and found[1] >= self._clock() - sessions.TOUCH_EVERY_S:
                return session_id
        return await self.write(
            sessions.ensure_op,
            scope=scope,
            external_id=external_id,
            session_id=session_id,
            now=self._clock(),
        )

    async def close_session(self, session_id: str, reason: str) -> int:
        """Close a session; its turns without next state -> dropped. Returns how many turns were
        dropped.
        """
        return await self.write(
            sessions.close_op, session_ids=[session_id], reason=reason, now=self._clock()
        )

    async def close_idle_sessions(self, idle_s: float) -> int:
        """Close all sessions not seen for `idle_s`. Returns the number of turns dropped."""
        dropped = 0
        while True:
            now = self._clock()
            limit = _IDLE_SESSIONS_PER_TRANSACTION
            if not await self.read(sessions.idle, before=now - idle_s, limit=1):
                return dropped
            closed, turns_dropped = await self.write(
                sessions.close_idle_op, before=now - idle_s, limit=limit, now=now
            )
            dropped += turns_dropped
            if closed < limit:
                return dropped

    async def turns_by_response_node(self, scope: str, node_ids: Sequence[str]) -> list[TurnRef]:
        """Turns whose response is one of these nodes, oldest first."""
        return await self.read(linking.by_response_node, scope=scope, node_ids=node_ids)

    async def turns_by_prompt_node(self, scope: str, node_id: str) -> list[TurnRef]:
        """Turns that answered exactly this prompt, oldest first."""
        return await self.read(linking.by_prompt_node, scope=scope, node_id=node_id)

    async def turns_by_fingerprint(
        self,
        scope: str,
        fingerprint: str,
        since: float,
        limit: int,
        session_id: str | None = None,
    ) -> list[TurnRef]:
        """At most `limit` turns created since `since` (unix seconds) with this response, oldest
        first. Those of this session are preferred to others, unanswered to answered, new to old.
        """
        return await self.read(
            linking.by_fingerprint,
            scope=scope,
            fingerprint=fingerprint,
            since=since,
            limit=limit,
            session_id=session_id,
        )

    async def turns_by_calls(
        self, scope: str, calls_key: str, since: float, limit: int
    ) -> list[TurnRef]:
        """The newest `limit` turns since `since` with these calls, whatever their ids; oldest
        first.
        """
        return await self.read(
            linking.by_calls, scope=scope, calls_key=calls_key, since=since, limit=limit
        )

    async def turns_by_id(
        self, scope: str, turn_ids: Sequence[str], fingerprint: str | None = None
    ) -> list[TurnRef]:
        """Those of these turns that exist in the scope (with this response), oldest first."""
        return await self.read(
            linking.by_turn_ids, scope=scope, turn_ids=turn_ids, fingerprint=fingerprint
        )

    async def session_of_nodes(self, scope: str, node_ids: Sequence[str]) -> str | None:
        """The session of the newest turn whose prompt or response is the deepest of these."""
        return await self.read(linking.session_of_nodes, scope=scope, node_ids=node_ids)

    async def recent_summaries(
        self, scope: str, rules: Sequence[str], since: float, limit: int
    ) -> list[tuple[str, Message]]:
        """(session, reply) of the newest side turns since `since` that these rules marked."""
        return await self.read(
            linking.recent_summaries, scope=scope, rules=rules, since=since, limit=limit
        )
