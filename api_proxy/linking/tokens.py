"""The prompt's ids: an earlier turn's ids extended if that is provably the same, else rendered.

Sampled ids are never tokenised again: a prompt that continues a turn starts with that turn's prompt
and response ids. The rendering decides whether the template means this; this module checks that the
client echoed what it was sent and offers the same tools. A bounded cache of recent turns saves
reading their tokens back; the store remains authoritative.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from api_proxy.linking.linking import Link
from api_proxy.linking.workers import Workers
from api_proxy.request.completion import Completion
from records.messages import Message, content_text
from records.store import Store
from records.types import Ids
from rollout_bridge.rendering.rendering import Rendering

_LEAST_SHARED = 256
"""A prompt that shares only part of its parent's ids names the parent if it shares this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentTokens:
    """The ids of an earlier turn, the tools in its prompt, and whether its template was told to
    think (None: the run's default).
    """

    turn_id: str
    prompt_ids: Ids
    response_ids: Ids
    tools: list[dict[str, Any]]
    enable_thinking: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Ids of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids to sample from; the first `num_shared_ids` are those of the turn `token_parent_id`,
    whose prompt and response have `parent_length` together.

    `how`: "extended" from the parent; "fallback", rendered in full although the parent was known
    and echoed; or "full", rendered with nothing to extend.
    """

    ids: Ids
    how: Literal["extended", "fallback", "full"]
    token_parent_id: str | None = None
    num_shared_ids: int = 0
    parent_length: int | None = None


class TokenCache:
    """The most recent turns' ids, at most `max_tokens` of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._turns: OrderedDict[str, ParentTokens] = OrderedDict()

    def add(self, turn: ParentTokens) -> None:
        """Keep a turn, as the most recent one."""
        known = self._turns.pop(turn.turn_id, None)
        self._num_tokens -= known.num_tokens if known else 0
        self._turns[turn.turn_id] = turn
        self._num_tokens += turn.num_tokens
        while self._num_tokens > self._max_tokens and self._turns:
            _, oldest = self._turns.popitem(last=False)
            self._num_tokens -= oldest.num_tokens

    def get(self, turn_id: str) -> ParentTokens | None:
        """A turn that is still kept."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self._turns.move_to_end(turn_id)
        return turn


class PromptBuilder:
    """Builds prompts for one rendering; those of long requests in a thread."""

    def __init__(
        self, store: Store, rendering: Rendering, cache: TokenCache, workers: Workers
    ) -> None:
        self._store = store
        self._rendering = rendering
        self.cache = cache
        self._workers = workers

    async def build(self, link: Link, completion: Completion) -> Prompt:
        """The prompt of a linked request.

        Raises ValueError if the template cannot render the messages, StoreError if the parent
        cannot be read.
        """
        parent = None
        if link.parent is not None and link.how == "path":
            parent = await self._parent(link.parent.turn_id)
        enable_thinking = completion.fields.enable_thinking
        if parent is not None and parent.enable_thinking != enable_thinking:
            parent = None
        return await self._workers.run(
            completion.num_bytes,
            _build,
            self._rendering.with_thinking(enable_thinking),
            parent,
            link,
            completion.messages,
            completion.tools,
        )

    async def _parent(self, turn_id: str) -> ParentTokens | None:
        cached = self.cache.get(turn_id)
        if cached is not None:
            return cached
        turn = await self._store.turn(turn_id)
        if turn is None:
            return None
        parent = ParentTokens(
            turn_id=turn_id,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            tools=turn.tools,
            enable_thinking=turn.sampling.get("enable_thinking"),
        )
        self.cache.add(parent)
        return parent


def _build(
    rendering: Rendering,
    parent: ParentTokens | None,
    link: Link,
    messages: Sequence[Message],
    tools: list[dict[str, Any]],
) -> Prompt:
    if parent is None:
        return Prompt(ids=rendering.prompt_ids(messages, tools), how="full")
    echoed = messages[len(messages) - len(link.next_state) - 1]
    can_extend = parent.tools == tools and _means_the_same(rendering, parent, echoed)
    if can_extend:
        ids = rendering.extend(parent.prompt_ids, parent.response_ids, link.next_state, tools)
        if ids is not None:
            return _with_parent(ids, "extended", parent)
    ids = rendering.prompt_ids(messages, tools)
    return _with_parent(ids, "fallback" if can_extend else "full", parent)


def _means_the_same(rendering: Rendering, parent: ParentTokens, echoed: Message) -> bool:
    """Whether the parent's ids mean what the client echoes.

    The path matched, so the echo is what was sent; but a reply that did not end by itself may
    contain more than was sent: a stop string, for example, or a call that was never closed.
    """
    if not len(parent.response_ids):
        return False
    if int(parent.response_ids[-1]) in rendering.stop_token_ids:
        return True
    parsed = rendering.parse(parent.response_ids, parent.tools, parent.prompt_ids)
    if not parsed.content and not parsed.tool_calls:
        return False  # cut off while it reasoned
    is_same_text = parsed.content.strip() == content_text(echoed.get("content")).strip()
    return is_same_text and len(parsed.tool_calls) == len(echoed.get("tool_calls") or ())


def _with_parent(
    ids: Ids, how: Literal["extended", "fallback", "full"], parent: ParentTokens
) -> Prompt:
    shared = num_shared(ids, parent)
    if not shared or shared < min(parent.num_tokens, _LEAST_SHARED):
        return Prompt(ids=ids, how=how)
    return Prompt(
        ids=ids,
        how=how,
        token_parent_id=parent.turn_id,
        num_shared_ids=shared,
        parent_length=parent.num_tokens,
    )


def num_shared(ids: Ids, parent: ParentTokens) -> int:
    """How many ids at the start of `ids` equal the parent's prompt + response ids."""
    earlier = np.concatenate([parent.prompt_ids, parent.response_ids])
    length = min(len(ids), len(earlier))
    differs = np.flatnonzero(ids[:length] != earlier[:length])
    return int(differs[0]) if len(differs) else length
