"""Removes secrets and personal data from what is stored, so that none is judged or trained on.

Every message is searched once on its way into the store: every text in it, including ids, names,
keys of objects and long numbers. Sampled ids cannot be redacted: other ids would be tokens that the
policy never saw. So a turn whose prompt, tools or response contain a finding is stored without its
tokens, its text redacted, as dropped (`sensitive`), while a next state is redacted and judged.
Conversations are recognised by the ids of their original messages (hashes), so that the next
request still finds its turn. The agent's own reply is untouched.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from records.config import Mode, RedactionConfig
from records.messages import Message, fingerprint
from records.names import DropReason
from records.privacy.detectors import TOO_LONG
from records.privacy.findings import Finder, digest
from records.privacy.json_walk import Texts, is_short, num_chars
from records.privacy.turnstile import Turnstile
from records.tables.columns import content_hash
from records.types import CapturedTurn, TurnIdentity

_REMEMBERED = 20_000
"""Messages whose findings are remembered; a history is sent again with each request."""
_REMEMBERED_CHARS = 16_000_000
"""Characters of changed messages that are kept with them."""
_SHORT = 2_000
"""Characters that are searched within about a millisecond."""
_REPEATED_ROLES = ("system", "developer")
_TOO_LONG = f"[{TOO_LONG}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What is known of a value with this content hash: what is stored in its place (None: itself),
    what was found in it, and the kind, place and digest of the first thing that is redacted.
    """

    key: str
    clean: Any = None
    found: Counter[str]
    first: tuple[str, str, str] | None = None
    num_chars: int = 0


_NOTHING = _Looked(key="", found=Counter())


class Redactor:
    """Finds and replaces as one configuration asks. May be used from several threads.

    `on_found(kind, mode, number)` is called for the findings of each distinct message, once.
    """

    def __init__(self, config: RedactionConfig) -> None:
        self._finder = Finder(config)
        self._max_chars = config.max_chars
        self._known: OrderedDict[str, _Looked] = OrderedDict()
        self._known_chars = 0
        self._lock = Lock()
        self._searching = Turnstile()
        self.on_found: Callable[[str, Mode, int], None] = lambda kind, mode, number: None

    @property
    def is_active(self) -> bool:
        """Whether anything is looked for."""
        return bool(self._finder.modes)

    def refused_length(self, *values: Any) -> int | None:
        """The maximum characters of a request, if these values have more; else None."""
        if self.is_active and num_chars(values, self._max_chars) > self._max_chars:
            return self._max_chars
        return None

    def messages(self, messages: Sequence[Message], *, takes_turns: bool = True) -> list[Message]:
        """The messages without what is to be redacted; those without findings are unchanged.

        With `takes_turns`, it waits while another thread searches; short values need not.
        """
        return [_stored(message, self._looked_at(message, takes_turns)) for message in messages]

    def turn(self, turn: CapturedTurn, scope: str, *, takes_turns: bool = True) -> CapturedTurn:
        """The turn as it may be stored, with its findings; one that was searched before is
        unchanged.
        """
        if self.is_done(turn):
            return turn
        messages = [self._looked_at(message, takes_turns) for message in turn.messages]
        response, tools, echo = (
            self._looked_at(value, takes_turns)
            for value in (turn.response, turn.tools, turn.request_echo)
        )
        everything = (*messages, response, tools, echo)
        findings = sum((looked.found for looked in everything), Counter[str]())
        if not any(self._finder.modes[kind] == "redact" for kind in findings):
            hashes = tuple(looked.key for looked in (*messages, response))
            return replace(
                turn, findings=dict(findings), body_hashes=hashes if all(hashes) else None
            )
        nothing = np.empty(0, dtype=np.int32)
        is_first = turn.drop_reason is None
        return replace(
            turn,
            messages=[
                _stored(message, looked)
                for message, looked in zip(turn.messages, messages, strict=True)
            ],
            response=_stored(turn.response, response),
            tools=_stored(turn.tools, tools),
            request_echo=_stored(turn.request_echo, echo),
            prompt_ids=nothing,
            response_ids=nothing,
            rollout_logprobs=np.empty(0, dtype=np.float32),
            token_parent_id=None,
            num_shared_ids=0,
            routed_experts=None,
            drop_reason=turn.drop_reason or DropReason.SENSITIVE,
            drop_detail=_where(turn, messages, response, tools) if is_first else turn.drop_detail,
            findings=dict(findings),
            body_hashes=None,
            identity=TurnIdentity(
                node_ids=tuple(turn.node_ids(scope)),
                fingerprint=fingerprint(turn.response),
            ),
        )

    def is_done(self, turn: CapturedTurn) -> bool:
        """Whether there is nothing to search in the turn, or it was searched before."""
        return not self.is_active or turn.identity is not None or turn.findings is not None

    def is_short(self, *values: Any) -> bool:
        """Whether the values are searched at once, so that it need not be in a thread."""
        return self._finder.is_ready and is_short(values, _SHORT)

    def _looked_at(self, value: Any, takes_turns: bool) -> _Looked:
        if not self.is_active or not value:
            return _NOTHING
        key = content_hash(value)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        if takes_turns:
            with self._searching:
                looked = self._look(key, value, self._searching.pause)
        else:
            looked = self._look(key, value, _no_pause)
        with self._lock:
            self._keep(looked)
        for kind, number in looked.found.items():
            self.on_found(kind, self._finder.modes[kind], number)
        return looked

    def _keep(self, looked: _Looked) -> None:
        before = self._known.pop(looked.key, None)
        self._known_chars += looked.num_chars - (before.num_chars if before is not None else 0)
        self._known[looked.key] = looked
        while len(self._known) > _REMEMBERED or self._known_chars > _REMEMBERED_CHARS:
            _, oldest = self._known.popitem(last=False)
            self._known_chars -= oldest.num_chars

    def _look(self, key: str, value: Any, pause: Callable[[], None]) -> _Looked:
        if num_chars(value, self._max_chars) > self._max_chars:
            found = Counter({TOO_LONG: 1})
            return _Looked(key=key, clean=_left_of(value), found=found, first=(TOO_LONG, "", ""))
        texts = Texts(value)
        cut, marked = self._finder.find(texts.joined, pause)
        found = Counter(finding.kind for finding in (*cut, *marked))
        if not cut:
            return _Looked(key=key, found=found)
        first = (cut[0].kind, texts.path_at(cut[0].start), digest(cut[0].text))
        clean = texts.without(cut)
        size = len(texts.joined)
        return _Looked(key=key, clean=clean, found=found, first=first, num_chars=size)


def _no_pause() -> None:
    """For a search that is over before anybody waits for it."""


def _stored(value: Any, looked: _Looked) -> Any:
    return value if looked.clean is None else looked.clean


def _left_of(value: Any) -> Any:
    """What is stored in place of a value that is too long to be searched."""
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        return {"role": value["role"][:16], "content": _TOO_LONG}
    return [] if isinstance(value, list) else {}


def _where(
    turn: CapturedTurn, messages: Sequence[_Looked], response: _Looked, tools: _Looked
) -> str | None:
    """What was found first, and where: `email in tools[3].function.description`.

    For what an agent sends again and again, the digest is added, with which it can be allowed.
    """
    if tools.first is not None:
        kind, path, digested = tools.first
        return f"{kind} in tools{path} {digested}".rstrip()
    for index, (message, looked) in enumerate(zip(turn.messages, messages, strict=True)):
        if looked.first is not None:
            kind, path, digested = looked.first
            is_repeated = message.get("role") in _REPEATED_ROLES
            return f"{kind} in messages[{index}]{path} {digested if is_repeated else ''}".rstrip()
    if response.first is not None:
        return f"{response.first[0]} in response{response.first[1]}"
    return None
