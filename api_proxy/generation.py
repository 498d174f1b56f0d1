"""One reply from the engine, whatever interrupts it: the sampled ids, their log-probs and versions.

A `Rollout` gathers what the engine sampled. When the engine breaks a reply off (it paused with
`abort`, or died and came back), sampling goes on from the prompt and the ids so far with the budget
that is left, and the version spans of each part are shifted to their place. Tokens of a part whose
end never arrived are of an unknown version.

It does not know messages or the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

import numpy as np

from records.types import Experts, Ids
from rollout_bridge.engine.errors import EngineProtocolError, EngineUnavailable
from rollout_bridge.engine.experts import joined_experts
from rollout_bridge.engine.types import Generation, GenerationChunk, ModelInfo, SamplingParams

logger = logging.getLogger(__name__)

UNKNOWN_LABEL = "unknown"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Engine(Protocol):
    """What the proxy needs of `rollout_bridge.engine.client.EngineClient`."""

    async def generate(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Generation: ...

    def stream(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]: ...

    async def score_topk(self, input_ids: Ids, start: int, k: int) -> tuple[Ids, np.ndarray]: ...
    async def abort(self, request_id: str) -> None: ...
    async def health(self) -> bool: ...
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

    For engines that report no spans: labels only ever move on, so a reply that ends under the label
    seen before it began was sampled under that one alone.
    """

    label: str | None = None


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What was sampled so far for one prompt.

    `finish_reason` is None while sampling goes on, and "abort" when it could not be completed.
    """

    prompt_ids: Ids
    params: SamplingParams
    seen: SeenVersion
    routing_key: str | None = None
    max_continuations: int = 8
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[LabelSpan] = field(default_factory=list)
    routed_experts: Experts | None = None
    finish_reason: str | None = None
    matched_stop: str | None = None
    num_cached_tokens: int = 0
    num_continuations: int = 0
    request_id: str = ""
    is_cancelled: bool = False
    has_invalid_logprobs: bool = False

    async def run(self, engine: Engine) -> None:
        """Sample the whole reply. Raises EngineError while nothing was sampled."""
        while self._goes_on():
            label_before = self.seen.label
            try:
                part = await engine.generate(
                    self._prompt_so_far(),
                    self._params_left(),
                    request_id=self._new_request(),
                    routing_key=self.routing_key,
                )
            except (EngineUnavailable, EngineProtocolError) as error:
                await self._lost(error, len(self.ids))
                continue
            self.ids += part.output_ids.tolist()
            self.logprobs += part.output_logprobs.tolist()
            await self._end_part(part, label_before)

    async def stream(self, engine: Engine) -> AsyncGenerator[tuple[list[int], list[float]], None]:
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
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        part = chunk.final or part
                        if chunk.new_ids:
                            ids, logprobs = list(chunk.new_ids), list(chunk.new_logprobs)
                            self.ids += ids
                            self.logprobs += logprobs
                            yield ids, logprobs
            except (EngineUnavailable, EngineProtocolError) as error:
                await self._lost(error, start)
                continue
            if part is None:
                raise EngineProtocolError("a stream ended without its last chunk")
            await self._end_part(part, label_before)

    async def cancel(self, engine: Engine) -> None:
        """The client is gone: break off at the engine and do not continue."""
        self.is_cancelled = True
        if self.request_id:
            await engine.abort(self.request_id)

    def _goes_on(self) -> bool:
        if self.is_cancelled and self.finish_reason is None:
            self.finish_reason = "abort"
        return self.finish_reason is None

    async def _end_part(self, part: Generation, label_before: str | None) -> None:
        start = len(self.ids) - len(part.output_ids)
        self.spans += _label_spans(part, start, label_before)
        self.routed_experts = joined_experts(self.routed_experts, part.routed_experts)
        self.seen.label = part.weight_version or self.seen.label
        if start == 0:
            self.num_cached_tokens = part.cached_tokens
        if part.finish_reason == "abort":
            await self._interrupted()
            return
        self.finish_reason = part.finish_reason
        self.matched_stop = part.matched if isinstance(part.matched, str) else None

    async def _lost(self, error: EngineUnavailable | EngineProtocolError, start: int) -> None:
        """A part broke off without its end; `start` is where it began.

        The engine client has tried again what can be tried while nothing had been sampled. An
        answer that breaks the contract (a log-prob that is not finite, say) is worth one more try:
        the agent wants its reply, though the turn cannot train.
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
        await self._interrupted()

    async def _interrupted(self) -> None:
        """Make ready to continue, or settle that the reply ends here."""
        if len(self.ids) >= self.params.max_new_tokens:
            self.finish_reason = "length"
        elif self.is_cancelled or self.num_continuations >= self.max_continuations:
            self.finish_reason = "abort"
        else:
            pause_s = _FIRST_PAUSE_S * 2**self.num_continuations
            self.num_continuations += 1
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def _new_request(self) -> str:
        self.request_id = uuid4().hex
        return self.request_id

    def _prompt_so_far(self) -> Ids:
        if not self.ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.ids, dtype=np.int32)])

    def _params_left(self) -> SamplingParams:
        if not self.ids:
            return self.params
        return replace(self.params, max_new_tokens=self.params.max_new_tokens - len(self.ids))


def _label_spans(part: Generation, start: int, label_before: str | None) -> list[LabelSpan]:
    """The spans of one part, moved to where the part stands in the reply."""
    if part.weight_spans is not None:
        return [
            LabelSpan(label=span.version, start=span.start + start, end=span.end + start)
            for span in part.weight_spans
        ]
    if part.weight_version is None or part.weight_version != label_before:
        return []
    return [LabelSpan(label=part.weight_version, start=start, end=start + len(part.output_ids))]
