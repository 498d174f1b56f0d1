"""Which earlier turn a request answers: pure decisions over what the store knows.

The newest assistant message of a request is either one that this endpoint sent, or not. If it is,
everything after it is that turn's next state. The full message path decides first; an agent that
rewrote its history (a clock in the system prompt, compaction, re-serialised arguments) is found by
the message's fingerprint and by how much of what precedes it agrees. A guess is worse than nothing:
where several conversations fit equally and none is waiting, the link is `ambiguous`.

Nothing here reads the store; `lineage` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from records.messages import Message, content_text, fingerprint
from records.names import REJUDGEABLE, DropReason, TurnState
from records.types import TurnRef

_SUMMARY = re.compile(r"<summary>(.*)</summary>", re.DOTALL)
_DISTINCTIVE_CHARS = 32
"""A text answer at least this long is taken to identify its turn without an agreeing history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where a request belongs.

    `parent` is the turn that its newest assistant message came from; `next_state` the messages
    after it. `how` tells which identity matched; `retry` that this prompt was answered before. If
    it is `ambiguous`, `session_id` is the one session of all turns that fit.
    """

    how: Literal["none", "path", "fingerprint", "calls"] = "none"
    parent: TurnRef | None = None
    next_state: tuple[Message, ...] = ()
    ambiguous: bool = False
    retry: bool = False
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An earlier turn with an equal answer, and the prompt that it answered."""

    ref: TurnRef
    messages: Sequence[Message]


def newest_assistant(messages: Sequence[Message]) -> int | None:
    """Index of the last assistant message, or None."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    return None


def is_unanswered(ref: TurnRef) -> bool:
    """Whether nothing followed the turn yet, and what follows could matter to it.

    A turn may have been judged, and trained, by feedback alone: its user still goes on.
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
    """Link a request whose newest assistant message is, path included, what `matches` answered.

    `siblings` are turns that answered this very prompt before: then the request is a retry, which
    belongs to the turn that they belong to and never to a sibling of it. So it does if this prompt
    was linked to the turn `asked_of` before, and got no answer (yet). `session_id` is the session
    that the client named, if it did.
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

    The candidates whose prompt agrees longest with the messages before `index`, read backwards,
    are kept; among them those that differ in system messages alone, if there are any. When nothing
    agrees, only a distinctive answer (tool calls, a long text) or an equal first message links.
    Different prompts that fit equally are no evidence, be they of one conversation. If the client
    named its session, text alone does not link to another.
    """
    pool = list(candidates)
    if session_id is not None:
        pool = [c for c in candidates if c.ref.session_id == session_id]
        if not pool and messages[index].get("tool_calls"):
            # The ids of tool calls are unique: whatever the session is called, these are ours.
            pool = list(candidates)
    if not pool:
        return Link()
    agreements = [num_agreeing(messages[:index], candidate.messages) for candidate in pool]
    longest = max(agreements)
    best = [c for c, length in zip(pool, agreements, strict=True) if length == longest]
    if longest == 0:
        if not _is_distinctive(messages[index]):
            best = [c for c in best if _same_start(messages, c.messages)]
        if not best:
            return Link()
    spoken = _spoken(messages[:index])
    best = [c for c in best if _spoken(c.messages) == spoken] or best
    next_state = tuple(messages[index + 1 :])
    sessions = {candidate.ref.session_id for candidate in best}
    is_one_prompt = len({_spoken(candidate.messages) for candidate in best}) == 1
    if is_one_prompt and (longest > 0 or len(sessions) == 1):
        return _choose("fingerprint", [c.ref for c in best], next_state)
    session = sessions.pop() if len(sessions) == 1 else None
    return Link(how="fingerprint", ambiguous=True, session_id=session)


def link_by_calls(refs: Sequence[TurnRef], next_state: Sequence[Message]) -> Link:
    """Link a request whose newest assistant message tells as text the calls of `refs`, one turn."""
    if len(refs) != 1:
        return Link()
    return Link(how="calls", parent=refs[0], next_state=tuple(next_state))


def num_agreeing(history: Sequence[Message], prompt: Sequence[Message]) -> int:
    """How many messages at the end of both are equal by fingerprint."""
    count = 0
    for mine, theirs in zip(reversed(history), reversed(prompt), strict=False):
        if fingerprint(mine) != fingerprint(theirs):
            break
        count += 1
    return count


def holds_summary(messages: Sequence[Message], reply: Message) -> bool:
    """Whether one of the messages that no assistant wrote holds what `reply` summed up.

    Agents keep what stands between the reply's summary tags, if it has some, and space it anew.
    """
    text = content_text(reply.get("content"))
    tagged = _SUMMARY.search(text)
    summary = _spaced(tagged[1] if tagged else text)
    return len(summary) >= _DISTINCTIVE_CHARS and any(
        summary in _spaced(content_text(message.get("content")))
        for message in messages
        if message["role"] != "assistant"
    )


def may_hold_summary(messages: Sequence[Message]) -> bool:
    """Whether a message is long enough for that."""
    return any(
        len(content_text(message.get("content"))) >= _DISTINCTIVE_CHARS
        for message in messages
        if message["role"] != "assistant"
    )


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _choose(
    how: Literal["path", "fingerprint"], refs: Sequence[TurnRef], next_state: Sequence[Message]
) -> Link:
    """The oldest unanswered turn; if all are answered, their one session's newest."""
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
    """The turns of the session that the client named; all if it has none of them (not `strict`)."""
    if session_id is None:
        return list(refs)
    own = [ref for ref in refs if ref.session_id == session_id]
    return own if own or strict else list(refs)


def _spoken(messages: Sequence[Message]) -> tuple[str, ...]:
    """The conversation without system messages, by fingerprints."""
    return tuple(
        fingerprint(message)
        for message in messages
        if message["role"] not in ("system", "developer")
    )


def _is_distinctive(message: Message) -> bool:
    text = content_text(message.get("content"))
    return bool(message.get("tool_calls")) or len(text.strip()) >= _DISTINCTIVE_CHARS


def _same_start(history: Sequence[Message], prompt: Sequence[Message]) -> bool:
    return bool(prompt) and fingerprint(history[0]) == fingerprint(prompt[0])
