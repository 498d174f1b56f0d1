"""Which earlier turn a request answers: pure decisions over what the store knows.

The newest assistant message of a request is either one that this endpoint sent, or not. If it is,
everything after it is that turn's next state. The full message path decides first. If an agent
rewrote its history (a clock in the system prompt, compaction, re-serialised arguments), the
message's fingerprint decides, and how much of what precedes it agrees; if it rewrote the text next
to its calls, the calls decide: their ids, or their names and arguments. A guess is worse than
nothing: if several conversations fit equally well and none is waiting, the link is `ambiguous`.

Nothing here reads the store; `lineage` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from records.messages import (
    EchoChange,
    Message,
    content_text,
    echo_changes,
    fingerprint,
    loose_fingerprint,
)
from records.names import REJUDGEABLE, DropReason, TurnState
from records.types import TurnRef

How: TypeAlias = Literal["none", "path", "fingerprint", "calls", "equal_calls"]
Identity: TypeAlias = Callable[[Message], str]

_OPENING, _CLOSING = "<summary>", "</summary>"
_DISTINCTIVE_CHARS = 32
"""A text answer at least this long is taken to identify its turn without an agreeing history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where a request belongs.

    `parent` is the turn that its newest assistant message came from; `next_state` the messages
    after it. `how` tells which identity matched; `retry` that this prompt was answered before. If
    it is `ambiguous`, `session_id` is the one session of all turns that fit. `echo_changes` is what
    the client changed in the parent's answer: the visible history then differs from what was
    sampled, and no prompt extends the parent's.
    """

    how: How = "none"
    parent: TurnRef | None = None
    next_state: tuple[Message, ...] = ()
    echo_changes: tuple[EchoChange, ...] = ()
    ambiguous: bool = False
    retry: bool = False
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An earlier turn whose answer may be the one meant, and the prompt that it answered."""

    ref: TurnRef
    messages: Sequence[Message]
    response: Message | None = None


def newest_assistant(messages: Sequence[Message]) -> int | None:
    """Index of the last assistant message, or None."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    return None


def is_unanswered(ref: TurnRef) -> bool:
    """Whether nothing has followed the turn yet, and what follows could matter to it.

    A turn may have been judged, and trained, on feedback alone: its user may still continue.
    """
    if ref.has_next_state:
        return False
    return ref.state is not TurnState.DROPPED or ref.drop_reason in REJUDGEABLE


def link_by_path(
    matches: Sequence[TurnRef],
    siblings: Sequence[TurnRef],
    next_state: Sequence[Message],
    session_id: str | None,
    asked_of: str | None = None,
) -> Link:
    """Link a request whose newest assistant message is, path included, the answer of `matches`.

    `siblings` are turns that answered this exact prompt before: the request is then a retry, which
    has the same parent as they have and never a sibling of it. The same goes if this prompt was
    linked to the turn `asked_of` before, and got no answer (yet). `session_id` is the session that
    the client named, if it did.
    """
    if not matches:
        return Link()
    for ref in matches:
        if ref.turn_id == asked_of:
            return Link(how="path", parent=ref, next_state=tuple(next_state), retry=True)
    retried = _in_session(siblings, session_id, strict=True)
    for sibling in sorted(retried, key=lambda ref: ref.created_at):
        if sibling.drop_reason is DropReason.AMBIGUOUS_PARENT:
            return Link(how="path", ambiguous=True, retry=True)
        for ref in matches:
            if ref.turn_id == sibling.parent_turn_id:
                return Link(how="path", parent=ref, next_state=tuple(next_state), retry=True)
    return _choose("path", _in_session(matches, session_id), next_state)


def link_by_fingerprint(
    messages: Sequence[Message],
    index: int,
    candidates: Sequence[Candidate],
    session_id: str | None,
) -> Link:
    """Link a request whose history was rewritten, by its assistant message at `index`.

    The candidates whose prompt agrees longest with the messages before `index`, read backwards, are
    kept; among them those that differ only in system messages, if there are any. When nothing
    agrees, only a distinctive answer (tool calls, a long text) or an equal first message links.
    Different prompts that fit equally well are no evidence, even within one conversation. If the
    client named its session, text alone does not link to another.
    """
    pool = list(candidates)
    if session_id is not None:
        pool = [c for c in candidates if c.ref.session_id == session_id]
        if not pool and messages[index].get("tool_calls"):
            # The ids of tool calls are unique: whatever the session is called, these are ours.
            pool = list(candidates)
    is_distinctive = _is_distinctive(messages[index])
    return _of_longest_agreement("fingerprint", messages, index, pool, fingerprint, is_distinctive)


def link_by_calls(messages: Sequence[Message], index: int, candidates: Sequence[Candidate]) -> Link:
    """Link a request by the ids of calls in its assistant message at `index`: they lead to the one
    candidate, if there is one.

    The message has them as calls, with the names and arguments that were sent, or as text.
    """
    if not candidates:
        return Link()
    (candidate,) = candidates
    changes: tuple[EchoChange, ...] | None = ("retold",)
    if messages[index].get("tool_calls"):
        changes = echo_changes(candidate.response or {}, messages[index])
    if changes is None:
        return Link()
    return Link(
        how="calls",
        parent=candidate.ref,
        next_state=tuple(messages[index + 1 :]),
        echo_changes=changes,
    )


def link_by_equal_calls(
    messages: Sequence[Message],
    index: int,
    candidates: Sequence[Candidate],
    session_id: str | None,
) -> Link:
    """Link a request whose calls have other ids than were sent, by their names and arguments.

    Like `link_by_fingerprint`, with ids and the text next to calls left out of every comparison.
    Equal calls alone identify nothing: something before them must agree.
    """
    pool = [c for c in candidates if session_id is None or c.ref.session_id == session_id]
    link = _of_longest_agreement(
        "equal_calls", messages, index, pool, loose_fingerprint, is_distinctive=False
    )
    if link.parent is None:
        return link
    (sent,) = [c.response for c in pool if c.ref.turn_id == link.parent.turn_id]
    return replace(link, echo_changes=echo_changes(sent or {}, messages[index]) or ())


def _of_longest_agreement(
    how: How,
    messages: Sequence[Message],
    index: int,
    pool: Sequence[Candidate],
    identity: Identity,
    is_distinctive: bool,
) -> Link:
    if not pool:
        return Link()
    same = _Sameness(identity)
    history = messages[:index]
    agreements = [num_agreeing(history, candidate.messages, same) for candidate in pool]
    longest = max(agreements)
    kept = [one for one, length in zip(pool, agreements, strict=True) if length == longest]
    if longest == 0:
        if not is_distinctive:
            kept = [one for one in kept if same.all(history[:1], one.messages[:1])]
        if not kept:
            return Link()
    spoken = _spoken(history)
    alike = [one for one in kept if same.all(spoken, _spoken(one.messages))]
    first = _spoken(kept[0].messages)
    is_one_prompt = bool(alike) or all(same.all(first, _spoken(c.messages)) for c in kept[1:])
    kept = alike or kept
    next_state = tuple(messages[index + 1 :])
    sessions = {one.ref.session_id for one in kept}
    if is_one_prompt and (longest > 0 or len(sessions) == 1):
        return _choose(how, [one.ref for one in kept], next_state)
    session = sessions.pop() if len(sessions) == 1 else None
    return Link(how=how, ambiguous=True, session_id=session)


class _Sameness:
    """Whether messages have the same identity, in the time that it takes to read what they share.

    Messages that are equal as they are need no identity; others have theirs computed once. Of
    prompts that were rewritten in equal words (a client's retries), only one is digested.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._of_message: dict[int, str] = {}
        self._latest: dict[int, tuple[Message, bool]] = {}

    def __call__(self, mine: Message, theirs: Message) -> bool:
        """Whether two messages are the same; both must outlive this object."""
        if mine == theirs:
            return True
        known = self._latest.get(id(mine))
        if known is not None and known[0] == theirs:
            return known[1]
        found = self._digest(mine) == self._digest(theirs)
        self._latest[id(mine)] = theirs, found
        return found

    def all(self, mine: Sequence[Message], theirs: Sequence[Message]) -> bool:
        """Whether two conversations are the same; stops at the first message that is not."""
        return len(mine) == len(theirs) and all(map(self, mine, theirs))

    def _digest(self, message: Message) -> str:
        found = self._of_message.get(id(message))
        if found is None:
            found = self._of_message[id(message)] = self._identity(message)
        return found


def num_agreeing(
    history: Sequence[Message], prompt: Sequence[Message], same: Callable[[Message, Message], bool]
) -> int:
    """How many messages at the end of both are the same."""
    count = 0
    for mine, theirs in zip(reversed(history), reversed(prompt), strict=False):
        if not same(mine, theirs):
            break
        count += 1
    return count


def summarised(messages: Sequence[Message], summaries: Sequence[tuple[str, Message]]) -> set[str]:
    """The sessions of those `summaries` (session id, reply) whose text is in a message that no
    assistant wrote.

    Agents keep the text between the reply's summary tags, if it has any, and change its blanks.
    """
    texts = [
        _spaced(content_text(message.get("content")))
        for message in messages
        if message["role"] != "assistant"
    ]
    found = [(session_id, _summary_of(reply)) for session_id, reply in summaries]
    return {
        session_id
        for session_id, summary in found
        if len(summary) >= _DISTINCTIVE_CHARS and any(summary in text for text in texts)
    }


def _summary_of(reply: Message) -> str:
    """The text between the first opening tag and the last closing one; without them, all of it."""
    text = content_text(reply.get("content"))
    start, end = text.find(_OPENING), text.rfind(_CLOSING)
    return _spaced(text[start + len(_OPENING) : end] if 0 <= start < end else text)


def may_hold_summary(messages: Sequence[Message]) -> bool:
    """Whether a message is long enough to contain a summary."""
    return any(
        len(content_text(message.get("content"))) >= _DISTINCTIVE_CHARS
        for message in messages
        if message["role"] != "assistant"
    )


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _choose(how: How, refs: Sequence[TurnRef], next_state: Sequence[Message]) -> Link:
    """The oldest unanswered turn; if all are answered, the newest of their session if it is one."""
    unanswered = [ref for ref in refs if is_unanswered(ref)]
    if unanswered:
        parent = min(unanswered, key=lambda ref: (ref.created_at, ref.turn_id))
    elif len({ref.session_id for ref in refs}) > 1:
        return Link(how=how, ambiguous=True)
    else:
        parent = max(refs, key=lambda ref: (ref.created_at, ref.turn_id))
    return Link(how=how, parent=parent, next_state=tuple(next_state))


def _in_session(
    refs: Sequence[TurnRef], session_id: str | None, *, strict: bool = False
) -> list[TurnRef]:
    """The turns of the session that the client named; all if none is in it (unless `strict`)."""
    if session_id is None:
        return list(refs)
    own = [ref for ref in refs if ref.session_id == session_id]
    return own if own or strict else list(refs)


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """The conversation without system messages."""
    return [message for message in messages if message["role"] not in ("system", "developer")]


def _is_distinctive(message: Message) -> bool:
    text = content_text(message.get("content"))
    return bool(message.get("tool_calls")) or len(text.strip()) >= _DISTINCTIVE_CHARS
