"""An engine that says what a test wrote down, token by token, and breaks where the test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from records.types import Ids
from rollout_bridge.engine.errors import EngineUnavailable
from rollout_bridge.engine.types import (
    Generation,
    GenerationChunk,
    ModelInfo,
    SamplingParams,
    TopLogprobs,
    WeightSpan,
)


@dataclass(kw_only=True)
class Line:
    """One scripted answer.

    `ids` are sampled in chunks of `chunk`. Before token `hang_at` the engine waits until the
    request is aborted; at `abort_at` it ends the request by itself, at `fail_at` it vanishes.
    `spans` is (version, end) pairs, None for an engine that reports none.
    """

    ids: list[int]
    chunk: int = 1
    matched: str | None = None
    finish_reason: str = "stop"
    hang_at: int | None = None
    abort_at: int | None = None
    fail_at: int | None = None
    version: str = "0"
    spans: list[tuple[str, int]] | None = field(default_factory=list)
    logprob: float = -0.5


class ScriptedEngine:
    """Answers requests with `script`, in order; `prompts` and `params` are what was asked."""

    def __init__(self, context_length: int | None = 4096) -> None:
        self.script: deque[Line | Exception] = deque()
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.num_closed = 0
        self.hears_aborts = True
        self.gate: asyncio.Event | None = None
        self._context_length = context_length
        self._aborts: dict[str, asyncio.Event] = {}

    def next_line(self, input_ids: Ids, params: SamplingParams) -> Line:
        """The next answer of the script; raises what stands there instead."""
        self.prompts.append(np.asarray(input_ids).tolist())
        self.params.append(params)
        line = self.script.popleft()
        if isinstance(line, Exception):
            raise line
        return line

    async def generate(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> Generation:
        final = None
        async for chunk in self.stream(input_ids, params, request_id=request_id):
            final = chunk.final or final
        assert final is not None
        return final

    async def stream(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        line = self.next_line(input_ids, params)
        if self.gate is not None:
            await self.gate.wait()
        aborted = self._aborts.setdefault(request_id or "", asyncio.Event())
        is_finished = False
        try:
            position = 0
            while True:
                reason = await self._interruption(line, position, aborted)
                end = min(position + line.chunk, len(line.ids))
                if reason is None and end == len(line.ids):
                    reason = line.finish_reason
                if reason != "abort":
                    new = line.ids[position:end]
                    position = end
                else:
                    new = []
                is_finished = reason is not None
                yield GenerationChunk(
                    new_ids=tuple(new),
                    new_logprobs=(line.logprob,) * len(new),
                    new_top=_top(line, params, len(new)),
                    final=self._final(line, params, position, reason) if reason else None,
                )
                if is_finished:
                    return
                await asyncio.sleep(0)
        finally:
            if not is_finished:
                self.num_closed += 1

    async def _interruption(self, line: Line, position: int, aborted: asyncio.Event) -> str | None:
        if line.fail_at is not None and position >= line.fail_at:
            raise EngineUnavailable("scripted failure")
        if line.abort_at is not None and position >= line.abort_at:
            return "abort"
        if line.hang_at is not None and position >= line.hang_at:
            await aborted.wait()
            return "abort"
        return None

    def _final(self, line: Line, params: SamplingParams, length: int, reason: str) -> Generation:
        spans = None
        if line.spans is not None:
            ends = [(version, min(end, length)) for version, end in line.spans]
            ends = ends or [(line.version, length)]
            starts = [0, *[end for _, end in ends[:-1]]]
            spans = tuple(
                WeightSpan(version=version, start=start, end=end)
                for start, (version, end) in zip(starts, ends, strict=True)
            )
        return Generation(
            output_ids=np.asarray(line.ids[:length], dtype=np.int32),
            output_logprobs=np.full(length, line.logprob, dtype=np.float32),
            text="",
            finish_reason=reason,  # type: ignore[arg-type]
            matched=line.matched,
            weight_version=line.version,
            weight_spans=spans,
            prompt_tokens=0,
            cached_tokens=0,
            top=_top(line, params, length),
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.hears_aborts and request_id in self._aborts:
            self._aborts[request_id].set()

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            model_path="scripted",
            weight_version="0",
            vocab_size=None,
            context_length=self._context_length,
        )


def _top(line: Line, params: SamplingParams, count: int) -> tuple[TopLogprobs, ...]:
    best = tuple((token, line.logprob - token) for token in range(params.top_logprobs))
    return (best,) * count if best else ()
