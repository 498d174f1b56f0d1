"""Finds where a request belongs: asks the store for candidates and lets `linking` decide.

Everything is looked up within the scope of one API key. It only reads; what follows from a link
(the next state, the session) is written elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from api_proxy.linking.linking import (
    Candidate,
    Link,
    is_unanswered,
    link_by_calls,
    link_by_equal_calls,
    link_by_fingerprint,
    link_by_path,
    may_hold_summary,
    newest_assistant,
    summarised,
)
from api_proxy.linking.workers import Workers
from api_proxy.reply.reply import turns_called_in
from api_proxy.sharing.sharing import Sharing
from records.messages import Message, calls_key, content_text, fingerprint, path_ids
from records.store import Store
from records.types import TurnRef

LinkBy: TypeAlias = Callable[[Sequence[Message], int, Sequence[Candidate]], Link]

_MOST_CLAIMS = 8
"""How often a request is linked again because another one answered the same turn meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A request's link, and the session that it continues (None: it starts one)."""

    link: Link
    session_id: str | None
    has_history: bool
    """Whether the request contains an assistant message, so that a link is expected."""
    is_deferred: bool = False
    """Whether the store could not be asked: the request is linked when its turn is stored."""
    is_repeated: bool = False
    """Whether it is a first request sent again after it got no answer; its session may not be
    stored.
    """
    path: tuple[str, ...] | None = None
    """Node ids of the messages as they were sent; None: not known yet."""
    first_node: str | None = None
    """The prompt's node, for a request without history whose client did not name its session."""


class LineageFinder:
    """Links requests by what the store knows.

    `idle_timeout_s` is how far back a rewritten history is followed; `max_candidates` how many
    earlier turns with an equal answer are compared; `summary_rules` mark the side turns whose
    replies replace a history.
    """

    def __init__(
        self,
        store: Store,
        idle_timeout_s: float,
        max_candidates: int,
        summary_rules: Collection[str] = (),
        workers: Workers | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._store = store
        self._workers = workers or Workers(0)
        self._summary_rules = sorted(summary_rules)
        self._idle_timeout_s = idle_timeout_s
        self._max_candidates = max_candidates
        sharing = sharing or Sharing.alone()
        self._answered = sharing.answered
        """Turns whose next state is on its way to the store, or just got there."""
        self._asked = sharing.asked
        """What a prompt (node, named session) was linked to: a request that failed leaves no turn
        by which its retry could be recognised.
        """
        self._left = sharing.left
        """Sessions of first requests that got no answer, by their prompt's node: a client that
        gives up and asks again is still the same one.
        """

    async def find(
        self,
        *,
        scope: str,
        messages: Sequence[Message],
        session_id: str | None,
        now: float,
        parent_turn_id: str | None = None,
        path: Sequence[str] | None = None,
        has_next_state: bool = True,
    ) -> Lineage:
        """The lineage of a request; `session_id` is set if the client named its session,
        `parent_turn_id` if it named the turn whose answer its newest assistant message is, `path`
        (node ids) if the messages are no longer what was sent. Without `has_next_state` (side
        requests, keys without consent), what follows that answer is not a next state.

        Raises StoreError.
        """
        index = newest_assistant(messages)
        path = path_ids(scope, messages) if path is None else path
        if index is None:
            first = Lineage(
                link=Link(),
                session_id=session_id,
                has_history=False,
                path=tuple(path),
                first_node=None if session_id else path[-1],
            )
            if session_id is not None:
                return first
            left = self._left.pop(path[-1])
            if left is not None:
                return replace(first, session_id=left.decode(), is_repeated=True)
            return replace(first, session_id=await self._session_of_summary(scope, messages, now))
        found = partial(self._linked, scope, messages, path, index, session_id, now, parent_turn_id)
        link = await found()
        for _ in range(_MOST_CLAIMS):
            if not has_next_state or self._claimed(link):
                break
            link = await found()
        if link.parent is not None:
            self._asked.put(_asked(path[-1], session_id), link.parent.turn_id.encode())
        if session_id is None and link.parent is not None:
            session_id = link.parent.session_id
        elif link.ambiguous:
            session_id = session_id or link.session_id
        elif session_id is None:
            # An edited answer matches no turn, but the messages before it may be known.
            session_id = await self._store.session_of_nodes(scope, path)
            session_id = session_id or await self._session_of_summary(scope, messages, now)
        return Lineage(link=link, session_id=session_id, has_history=True, path=tuple(path))

    def _claimed(self, link: Link) -> bool:
        """Take the turn that a request answers, so that no other request does; False if another
        one, perhaps of another worker, took it since the link was found.
        """
        if link.parent is None or not link.next_state:
            return True
        is_first = self._answered.add(link.parent.turn_id)
        return is_first or link.retry or not is_unanswered(link.parent)

    async def _linked(
        self,
        scope: str,
        messages: Sequence[Message],
        path: Sequence[str],
        index: int,
        session_id: str | None,
        now: float,
        parent_turn_id: str | None,
    ) -> Link:
        """The link of a request with an answer at `index`, by the surest way that finds one."""
        link = await self._by_path(scope, messages, path, index, session_id, parent_turn_id)
        if link.how == "none" and parent_turn_id is not None:
            link = await self._by_name(scope, messages, index, parent_turn_id)
        if link.how == "none":
            link = await self._by_fingerprint(scope, messages, index, session_id, now)
        if link.ambiguous:
            link = await self._asked_before(scope, messages, path, index, session_id) or link
        if link.how == "none":
            link = await self._by_calls(scope, messages, index)
        if link.how == "none":
            link = await self._by_equal_calls(scope, messages, index, session_id, now)
        return link

    async def _by_path(
        self,
        scope: str,
        messages: Sequence[Message],
        path: Sequence[str],
        index: int,
        session_id: str | None,
        parent_turn_id: str | None,
    ) -> Link:
        matches = await self._store.turns_by_response_node(scope, [path[index]])
        # Equal conversations have equal paths: only the client can tell them apart.
        matches = [ref for ref in matches if ref.turn_id == parent_turn_id] or matches
        siblings = []
        if len(matches) > 1:
            # Only then does it matter which of them an earlier, equal request answered.
            siblings = await self._store.turns_by_prompt_node(scope, path[-1])
        return link_by_path(
            self._current(matches),
            siblings,
            messages[index + 1 :],
            session_id,
            asked_of=self._asked_of(path, session_id),
        )

    def left(self, first_node: str, session_id: str) -> None:
        """Note that a first request got no answer: sent again, it continues the same session."""
        self._left.put(first_node, session_id.encode())

    def forget(self, turn_id: str) -> None:
        """The turn did not get the next state that `find` linked to it."""
        self._answered.pop(turn_id)

    def _asked_of(self, path: Sequence[str], session_id: str | None) -> str | None:
        found = self._asked.get(_asked(path[-1], session_id))
        return None if found is None else found.decode()

    def _current(self, refs: Sequence[TurnRef]) -> list[TurnRef]:
        """`refs`, updated with links made here that may not be committed yet.

        Without this, two users with equal conversations who continue at the same moment would both
        answer the same turn, and the reaction to the other turn would be lost.
        """
        return [
            ref if self._answered.get(ref.turn_id) is None else replace(ref, has_next_state=True)
            for ref in refs
        ]

    async def _by_fingerprint(
        self,
        scope: str,
        messages: Sequence[Message],
        index: int,
        session_id: str | None,
        now: float,
    ) -> Link:
        refs = await self._store.turns_by_fingerprint(
            scope,
            await self._fingerprint(messages[index]),
            now - self._idle_timeout_s,
            self._max_candidates,
            session_id,
        )
        refs = sorted(refs, key=lambda ref: self._preference(ref, session_id))
        link_by = partial(link_by_fingerprint, session_id=session_id)
        return await self._compared(messages, index, refs, link_by)

    async def _fingerprint(self, answer: Message) -> str:
        return await self._workers.run(_size([answer]), fingerprint, answer)

    async def _compared(
        self, messages: Sequence[Message], index: int, refs: Sequence[TurnRef], link_by: LinkBy
    ) -> Link:
        """What `link_by` finds among the turns `refs`, without those deleted meanwhile. It runs in
        a worker: it compares as many histories as there are candidates.
        """
        turns = await self._store.load_turns([ref.turn_id for ref in refs]) if refs else []
        known = {turn.turn_id: turn for turn in turns}
        candidates = [
            Candidate(
                ref=ref, messages=known[ref.turn_id].messages, response=known[ref.turn_id].response
            )
            for ref in self._current(refs)
            if ref.turn_id in known
        ]
        if not candidates:
            return Link()
        messages = await self._as_stored(messages)
        num_bytes = _size(messages) * (1 + len(candidates))
        return await self._workers.run(num_bytes, link_by, messages, index, candidates)

    async def _as_stored(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in their stored form, to be compared with stored ones."""
        return await self._store.redacted_messages(messages)

    async def _by_name(
        self, scope: str, messages: Sequence[Message], index: int, parent_turn_id: str
    ) -> Link:
        """The turn that the client named, although the messages before its answer have changed."""
        key = await self._fingerprint(messages[index])
        named = self._current(await self._store.turns_by_id(scope, [parent_turn_id], key))
        if not named:
            return Link()
        return Link(how="fingerprint", parent=named[0], next_state=tuple(messages[index + 1 :]))

    async def _by_calls(self, scope: str, messages: Sequence[Message], index: int) -> Link:
        """Link by the ids of calls. Agents keep these, whatever they do with the text next to them,
        even if they repeat the calls as text.
        """
        message = messages[index]
        ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
        turn_ids = turns_called_in(" ".join(ids) or content_text(message.get("content")))
        if len(turn_ids) != 1:
            return Link()
        refs = await self._store.turns_by_id(scope, turn_ids)
        return await self._compared(messages, index, refs, link_by_calls)

    async def _by_equal_calls(
        self,
        scope: str,
        messages: Sequence[Message],
        index: int,
        session_id: str | None,
        now: float,
    ) -> Link:
        """Link by names and arguments of calls, which agents keep if they rename the ids."""
        if not messages[index].get("tool_calls"):
            return Link()
        [stored] = await self._as_stored(messages[index : index + 1])
        key = await self._workers.run(_size([stored]), calls_key, stored)
        assert key is not None, "it has calls"
        refs = await self._store.turns_by_calls(
            scope, key, now - self._idle_timeout_s, self._max_candidates
        )
        link_by = partial(link_by_equal_calls, session_id=session_id)
        return await self._compared(messages, index, refs, link_by)

    async def _asked_before(
        self,
        scope: str,
        messages: Sequence[Message],
        path: Sequence[str],
        index: int,
        session_id: str | None,
    ) -> Link | None:
        """The turn that this exact prompt was linked to before, when it fitted only that one."""
        turn_id = self._asked_of(path, session_id)
        refs = await self._store.turns_by_id(scope, [turn_id] if turn_id else [])
        if not refs:
            return None
        next_state = tuple(messages[index + 1 :])
        return Link(how="fingerprint", parent=refs[0], next_state=next_state, retry=True)

    async def _session_of_summary(
        self, scope: str, messages: Sequence[Message], now: float
    ) -> str | None:
        """The summarised session, if the request contains such a summary: its history was
        compacted.
        """
        if not self._summary_rules or not may_hold_summary(messages):
            return None
        since = now - self._idle_timeout_s
        found = await self._store.recent_summaries(
            scope, self._summary_rules, since, self._max_candidates
        )
        if not found:
            return None
        messages = await self._as_stored(messages)
        replies = [reply for _, reply in found]
        held = await self._workers.run(_size([*messages, *replies]), summarised, messages, found)
        # Equal summaries of two conversations identify neither.
        return held.pop() if len(held) == 1 else None

    @staticmethod
    def _preference(ref: TurnRef, session_id: str | None) -> tuple[bool, bool, float]:
        """Candidates worth comparing first: of the named session, unanswered, recent."""
        return ref.session_id != session_id, not is_unanswered(ref), -ref.created_at


def _size(messages: Sequence[Message]) -> int:
    """About how many bytes they have, arguments of calls included."""
    return sum(
        100
        + len(content_text(message.get("content")))
        + sum(
            len(str(call["function"].get("arguments"))) for call in message.get("tool_calls") or ()
        )
        for message in messages
    )


def _asked(node: str, session_id: str | None) -> str:
    return f"{node} {session_id or ''}"
