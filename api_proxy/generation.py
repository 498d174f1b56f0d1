"""One reply from the engine, whatever interrupts it: the sampled ids, their log-probs and versions.

A `Rollout` gathers what the engine sampled. When the engine interrupts a reply (it paused with
`abort`, or died and came back), sampling continues from the prompt and the ids so far with the
budget that is left, and the version spans of each part are shifted to their place. Tokens of a part
whose end never arrived have an unknown version. Under a grammar a reply cannot be continued,
because an engine starts each request at the grammar's beginning: it is sampled anew if nobody has
read any of it, and ends there otherwise. If updates interrupt replies (`is_held_back`), such a
reply is therefore sent only when it is complete.

If weights change under running requests (`keeps_kv`), the engine's cache outlives its weights, also
for later requests with an equal prompt: SGLang then reports one version although two took part. So
each part names the version that is current for its sender as the cache's namespace, and a part that
reports any other version, or several, has mixed keys and values.

Tenants have namespaces of their own too (`cache_scope`): how many tokens were cached, and how fast
the first one came, would otherwise tell one what another has asked.

Independent of messages and the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

import numpy as np

from api_proxy.reply.stop_strings import StopStrings
from records.types import Experts, Ids
from rollout_bridge.engine.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from rollout_bridge.engine.experts import joined_experts
from rollout_bridge.engine.types import (
    Generation,
    GenerationChunk,
    ModelInfo,
    PauseMode,
    SamplingParams,
    TopLogprobs,
)

logger = logging.getLogger(__name__)

UNKNOWN_LABEL = "unknown"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_CONTEXT_MARGIN = 8
"""Engines reserve a few tokens of the context (SGLang 7 for a prompt): a reply that was interrupted
so close to its end cannot be sent back to be continued.
"""


class GeneratingEngine(Protocol):
    """What the proxy needs from `rollout_bridge.engine.client.EngineClient`."""

    async def generate(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> Generation: ...

    def stream(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]: ...

    async def abort(self, request_id: str) -> None: ...
    async def model_info(self) -> ModelInfo: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpan:
    """Response tokens [start, end) were sampled under the weights that the engine calls `label`."""

    label: str
    start: int
    end: int


@dataclass(slots=True)
class SeenVersion:
    """The weights' label in the engine's latest reply.

    For engines that report no spans: labels never go back, so a reply that ends under the label
    seen before it began was sampled under that one alone.
    """

    label: str | None = None


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What has been sampled so far for one prompt.

    `finish_reason` is None while sampling goes on, and "abort" when it could not be completed.
    `max_continuations` bounds the parts in a row that bring no token, and those that are sampled
    anew: parts that do bring some are bounded by the budget. `heard_at` (of a monotonic clock) is
    when the engine last sent tokens, or was last asked. `pause_mode` is what an update does to the
    reply. `has_mixed_kv`: see above.
    """

    prompt_ids: Ids
    params: SamplingParams
    seen: SeenVersion
    stops: StopStrings
    routing_key: str | None = None
    cache_scope: str | None = None
    max_continuations: int = 16
    pause_mode: PauseMode = "retract"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[LabelSpan] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    routed_experts: Experts | None = None
    finish_reason: str | None = None
    matched_stop: str | None = None
    num_cached_tokens: int = 0
    num_continuations: int = 0
    request_id: str = ""
    is_cancelled: bool = False
    has_invalid_logprobs: bool = False
    has_mixed_kv: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    _num_idle: int = field(default=0, init=False)
    _is_read: bool = field(default=False, init=False)

    async def run(self, engine: GeneratingEngine) -> None:
        """Sample the whole reply. Raises EngineError while nothing was sampled."""
        while self._goes_on():
            label_before = self.seen.label
            try:
                part = await engine.generate(
                    self._prompt_so_far(),
                    self._params_left(),
                    request_id=self._new_request(),
                    routing_key=self.routing_key,
                    cache_key=self._cache_key(label_before),
                )
            except EngineRejected as error:
                self._refused(error)
                continue
            except (EngineUnavailable, EngineProtocolError) as error:
                await self._lost(error, len(self.ids))
                continue
            start = len(self.ids)
            self._take(part.output_ids.tolist(), part.output_logprobs.tolist(), part.top, start)
            await self._end_part(part, label_before, start)

    async def stream(
        self, engine: GeneratingEngine
    ) -> AsyncGenerator[tuple[list[int], list[float]], None]:
        """Sample the reply, yielding (ids, log-probs) as they arrive.

        Closing the generator aborts the request. Raises EngineError while nothing was sampled.
        """
        while self._goes_on():
            label_before, start = self.seen.label, len(self.ids)
            part: Generation | None = None
            chunks = engine.stream(
                self._prompt_so_far(),
                self._params_left(),
                request_id=self._new_request(),
                routing_key=self.routing_key,
                cache_key=self._cache_key(label_before),
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        part = chunk.final or part
                        if chunk.new_ids and self.matched_stop is None:
                            self.heard_at = time.monotonic()
                            old = len(self.ids)
                            self._is_read = not self.is_held_back
                            self._take(chunk.new_ids, chunk.new_logprobs, chunk.new_top, start)
                            if not self.is_held_back:
                                yield self.ids[old:], self.logprobs[old:]
                            if self.matched_stop is not None:
                                await engine.abort(self.request_id)
            except EngineRejected as error:
                self._refused(error)
                continue
            except (EngineUnavailable, EngineProtocolError) as error:
                await self._lost(error, start)
                continue
            if part is None:
                raise EngineProtocolError("a stream ended without its last chunk")
            await self._end_part(part, label_before, start)
        if self.is_held_back and self.ids:
            yield self.ids, self.logprobs

    def _cache_key(self, label: str | None) -> str | None:
        """The namespace of cached prefixes; None for the shared one."""
        named = (self.cache_scope, label if self.keeps_kv else None)
        return "@".join(part for part in named if part is not None) or None

    async def cancel(self, engine: GeneratingEngine) -> None:
        """The client is gone: abort at the engine and do not continue."""
        self.is_cancelled = True
        if self.request_id:
            await engine.abort(self.request_id)

    def _goes_on(self) -> bool:
        if self.is_cancelled and self.finish_reason is None:
            self.finish_reason = "abort"
        return self.finish_reason is None

    def _take(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs],
        start: int,
    ) -> None:
        """Add new tokens of the part that began at `start`, up to a stop string across its
        start.
        """
        is_near = start > 0 and len(self.ids) < start + self.stops.reach
        self.ids += ids
        self.logprobs += logprobs
        self.top += top
        found = self.stops.across(self.ids, start) if is_near else None
        if found is not None:
            end, self.matched_stop = found
            del self.ids[end:], self.logprobs[end:], self.top[end:]

    async def _end_part(self, part: Generation, label_before: str | None, start: int) -> None:
        self.spans += _label_spans(part, start, label_before, len(self.ids))
        self.routed_experts = joined_experts(self.routed_experts, part.routed_experts)
        self.has_mixed_kv |= self.keeps_kv and _is_mixed(part, label_before)
        self.seen.label = part.weight_version or self.seen.label
        if start == 0:
            self.num_cached_tokens = part.cached_tokens
        if part.finish_reason == "abort" or self.matched_stop is not None:
            await self._interrupted(len(self.ids) - start)
            return
        self.finish_reason = part.finish_reason
        self.matched_stop = part.matched if isinstance(part.matched, str) else None

    async def _lost(self, error: EngineUnavailable | EngineProtocolError, start: int) -> None:
        """A part was lost before its end; `start` is where it began.

        The engine client has already retried what can be retried while nothing has been sampled. An
        answer that breaks the contract (a log-prob that is not finite, say) is worth one more try:
        the agent wants its reply, even though the turn cannot train.
        """
        if isinstance(error, EngineProtocolError):
            if self.has_invalid_logprobs:
                raise error
            self.has_invalid_logprobs = True
        elif not self.ids:
            raise error
        if len(self.ids) > start:
            self.spans.append(LabelSpan(label=UNKNOWN_LABEL, start=start, end=len(self.ids)))
        logger.warning("lost the engine's answer after %d tokens: %s", len(self.ids), error)
        await self._interrupted(len(self.ids) - start)

    def _refused(self, error: EngineRejected) -> None:
        """The engine refuses the prompt: the client's fault, unless the reply has almost used its
        budget.
        """
        left = self.params.max_new_tokens - len(self.ids)
        if not self.ids or left > _CONTEXT_MARGIN:
            raise error
        logger.info("a reply ends %d tokens before its budget: %s", left, error)
        self.finish_reason = "length"

    async def _interrupted(self, num_new: int) -> None:
        """Prepare to continue after a part of `num_new` tokens, or end the reply here."""
        is_kept = num_new > 0 and self.params.grammar is None
        self._num_idle = 0 if is_kept else self._num_idle + 1
        if self.matched_stop is not None:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.params.max_new_tokens:
            self.finish_reason = "length"
        elif self.is_cancelled or self._num_idle > self.max_continuations or self._is_final:
            self.finish_reason = "abort"
        else:
            if self.params.grammar is not None:
                self._start_over()
            self.num_continuations += 1
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**self._num_idle, _LONGEST_PAUSE_S))

    @property
    def is_held_back(self) -> bool:
        """Whether an update would interrupt the reply where it cannot be continued."""
        return self.params.grammar is not None and self.pause_mode == "abort"

    @property
    def keeps_kv(self) -> bool:
        """Whether weights change under running requests and cached prefixes."""
        return self.pause_mode == "in_place"

    @property
    def _is_final(self) -> bool:
        """Whether what was sampled can be neither continued nor discarded."""
        return self.params.grammar is not None and self._is_read

    def _start_over(self) -> None:
        """Discard what was sampled."""
        for tokens in (self.ids, self.logprobs, self.top, self.spans):
            tokens.clear()
        self.routed_experts = None
        self.has_mixed_kv = False

    def _new_request(self) -> str:
        self.request_id = uuid4().hex
        self.heard_at = time.monotonic()
        return self.request_id

    def _prompt_so_far(self) -> Ids:
        if not self.ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.ids, dtype=np.int32)])

    def _params_left(self) -> SamplingParams:
        if not self.ids:
            return self.params
        return replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - len(self.ids),
            min_new_tokens=max(self.params.min_new_tokens - len(self.ids), 0),
        )


def _is_mixed(part: Generation, cache_key: str | None) -> bool:
    """Whether keys and values of weights other than `cache_key`'s went into `part`."""
    if part.weight_spans is None:
        labels = {part.weight_version}
    else:
        labels = {span.version for span in part.weight_spans}
    return len(labels) > 1 or (part.cached_tokens > 0 and labels != {cache_key})


def _label_spans(
    part: Generation, start: int, label_before: str | None, end: int
) -> list[LabelSpan]:
    """The spans of one part, moved to the part's place in the reply, which ends at `end`."""
    if part.weight_spans is not None:
        moved = [(span.version, span.start + start, span.end + start) for span in part.weight_spans]
        return [
            LabelSpan(label=label, start=begin, end=min(stop, end))
            for label, begin, stop in moved
            if begin < end
        ]
    if part.weight_version is None or part.weight_version != label_before:
        return []
    return [LabelSpan(label=part.weight_version, start=start, end=end)]
