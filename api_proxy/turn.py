"""A request that is being answered: what is known about it between the route and the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from api_proxy.access.callers import Caller
from api_proxy.access.places import Place
from api_proxy.generation import Rollout
from api_proxy.linking.linking import Link
from api_proxy.linking.side_turns import Kind
from api_proxy.linking.tokens import Prompt
from api_proxy.reply.reply import Delta, Reply
from api_proxy.request.completion import Completion
from records.names import Consent, TurnType
from records.types import CapturedTurn


class Assembler(Protocol):
    """Makes the reply from the ids as they come (`streaming.ReplyAssembler`)."""

    mismatched: bool

    def push(self, ids: Sequence[int]) -> list[Delta]: ...
    def finish(
        self, response_ids: Sequence[int], matched_stop: str | None = None
    ) -> tuple[list[Delta], Reply]: ...


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request on its way.

    `notes` is the task that writes what the request itself brings, `commit` the one that writes the
    turn; `is_session_kept` tells that the session is in the store, `is_link_deferred` that the
    store could not be asked where the turn belongs; `path` has its messages' node ids (None: they
    were not computed); `first_node` is its prompt's node if it begins a conversation that its
    client did not name; `captured` is the turn in the form that the store takes; `is_lost`: the
    store refused it, or neither the store nor the spill file took it. `created` is in unix seconds,
    `started` of a monotonic clock. `is_cut`: the proxy is stopping. `place` is left when the reply
    is over.

    A request for several answers (`n`) becomes as many turns with one prompt: the first one has the
    others as `siblings`, `choice` is a turn's place among them, and `unfinished` has the ids of
    those still to be committed, one set for all.
    """

    turn_id: str
    completion: Completion
    caller: Caller
    session_id: str
    link: Link
    prompt: Prompt
    kind: Kind
    rollout: Rollout
    assembler: Assembler
    distribution_modified: str | None
    created: float
    choice: int = 0
    siblings: tuple[Turn, ...] = ()
    unfinished: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)
    client_gone: bool = False
    is_cut: bool = False
    place: Place | None = None
    is_session_kept: bool = False
    is_link_deferred: bool = False
    path: tuple[str, ...] | None = None
    first_node: str | None = None
    notes: asyncio.Task[None] | None = None
    commit: asyncio.Task[None] | None = None
    captured: CapturedTurn | None = None
    is_spilled: bool = False
    is_lost: bool = False
    latency_s: float = 0.0

    @property
    def scope(self) -> str:
        """Conversations of other scopes are not seen."""
        return self.caller.scope

    @property
    def turn_type(self) -> TurnType:
        """Main, side or text."""
        return self.kind.turn_type

    @property
    def answers(self) -> str | None:
        """The turn whose next state this request carries, if it may be used as such."""
        if self.link.parent is None or not self.link.next_state or not self.may_answer:
            return None
        return self.link.parent.turn_id

    @property
    def may_answer(self) -> bool:
        """Whether the request may carry a next state: it is no side request, and has consent."""
        return self.turn_type is not TurnType.SIDE and self.caller.consent is Consent.TRAIN
