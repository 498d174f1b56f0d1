"""One answer of an engine to a recorded prompt, and whether it may train, decided as for live
turns.

It neither chooses prompts nor stores answers; its callers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from api_proxy.config import ProxyConfig
from api_proxy.generation import GeneratingEngine, Rollout, SeenVersion
from api_proxy.recording.capture import Circumstances, drop_reason, sampling_record, version_spans
from api_proxy.reply.stop_strings import StopStrings
from api_proxy.reply.streaming import Detokenizer, ReplyAssembler
from opd.rehearsal.seats import Seats
from records.messages import Message
from records.names import DropReason, TurnType
from records.types import Ids, VersionSpan
from rollout_bridge.engine.types import PauseMode, SamplingParams
from rollout_bridge.rendering.rendering import Rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was sampled for a prompt. `drop`: why it does not train, None if it may."""

    turn_id: str
    rollout: Rollout
    message: Message
    version_spans: tuple[VersionSpan, ...]
    distribution_modified: str | None
    drop: DropReason | None
    latency_s: float
    sampling: dict[str, Any]
    """How it was sampled, as it is stored."""


class PolicySampler:
    """Samples whole answers from one engine, one at a time for each of `seats`; None: without a
    limit. `spare`: the engine as those in spare seats ask it. `on_answer` is called after each.
    """

    def __init__(
        self,
        engine: GeneratingEngine,
        rendering: Rendering,
        *,
        temperature: float,
        max_new_tokens: int,
        context_length: int | None,
        pause_mode: PauseMode,
        proxy: ProxyConfig,
        spare: GeneratingEngine | None = None,
        seats: Seats | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        self._seats, self._on_answer = seats, on_answer
        self._engine, self._spare = engine, spare or engine
        self._rendering, self._proxy = rendering, proxy
        self._temperature, self._max_new_tokens = temperature, max_new_tokens
        self._context_length = context_length
        self._pause_mode: PauseMode = pause_mode
        self._detokenizers: dict[bool | None, Detokenizer] = {}
        self._seen = SeenVersion()

    async def answer(
        self,
        prompt_ids: Ids,
        tools: Sequence[dict[str, Any]],
        *,
        turn_type: TurnType = TurnType.MAIN,
        routing_key: str | None = None,
        enable_thinking: bool | None = None,
    ) -> Answer:
        """Answer `prompt_ids` [P] once; they were rendered with this switch of the chat template.
        Raises EngineError.
        """
        started = time.monotonic()
        left = self._max_new_tokens
        if self._context_length is not None:
            left = min(left, self._context_length - len(prompt_ids))
        rollout = Rollout(
            prompt_ids=prompt_ids,
            params=SamplingParams(
                temperature=self._temperature,
                max_new_tokens=max(left, 1),
                stop_token_ids=self._rendering.stop_token_ids,
            ),
            seen=self._seen,
            stops=StopStrings(self._rendering.decode, ()),
            routing_key=routing_key,
            pause_mode=self._pause_mode,
        )
        async with self._seats.one() if self._seats else nullcontext("own") as seat:
            await rollout.run(self._engine if seat == "own" else self._spare)
        if self._on_answer is not None:
            self._on_answer()
        turn_id = uuid4().hex
        assembler = ReplyAssembler(
            self._reads(enable_thinking), prompt_ids=prompt_ids, tools=tools, turn_id=turn_id
        )
        _, reply = assembler.finish(rollout.ids)
        spans, version_fault = version_spans(rollout.spans, len(rollout.ids))
        modified = rollout.params.distribution_modified()
        circumstances = Circumstances(
            turn_type=turn_type,
            may_train=True,
            is_ambiguous=False,
            distribution_modified=modified,
        )
        return Answer(
            turn_id=turn_id,
            rollout=rollout,
            message=reply.message(),
            version_spans=spans,
            distribution_modified=modified,
            drop=drop_reason(rollout, reply, circumstances, version_fault, self._proxy),
            latency_s=time.monotonic() - started,
            sampling=sampling_record(rollout, enable_thinking),
        )

    def _reads(self, enable_thinking: bool | None) -> Detokenizer:
        """The detokenizer for replies to prompts with this switch of the chat template."""
        known = self._detokenizers.get(enable_thinking)
        if known is None:
            known = Detokenizer(self._rendering.with_thinking(enable_thinking))
            self._detokenizers[enable_thinking] = known
        return known
