"""On-policy distillation on recorded states: the policy answers a recorded prompt anew.

The sample takes the place and the verdict of the recorded turn: the hint says what the answer to
this prompt should have been, whoever gives it. Sampling waits while it is too far ahead of training
(ALGORITHMS 6.2). What is kept of a reply, and whether it may train, is decided as for live ones.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from uuid import uuid4

import numpy as np

from api_proxy.capture import Circumstances, drop_reason, sampling_record, version_spans
from api_proxy.config import ProxyConfig
from api_proxy.generation import Engine, Rollout, SeenVersion
from api_proxy.stop_strings import StopStrings
from api_proxy.streaming import Detokenizer, ReplyAssembler
from records.names import TurnState
from records.recording import RecordingKind
from records.store import Store
from records.types import CapturedTurn, TurnRecord
from rollout_bridge.engine.types import PauseMode, SamplingParams
from rollout_bridge.rendering import Rendering
from trainer.replay.config import ReplayConfig
from trainer.staleness import admit

_LOOK_EVERY_S = 0.25
_UNTRAINED = (TurnState.READY, TurnState.LEASED)


class PolicyResampler:
    """Samples from the policy's engine. `scope` is that of the recorded sessions."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        rendering: Rendering,
        config: ReplayConfig,
        *,
        scope: str,
        batch_size: int,
        context_length: int | None,
        pause_mode: PauseMode,
        proxy: ProxyConfig,
    ) -> None:
        self._store, self._engine, self._rendering = store, engine, rendering
        self._config, self._scope, self._batch_size = config, scope, batch_size
        self._context_length, self._proxy = context_length, proxy
        self._pause_mode: PauseMode = pause_mode
        self._detokenizer = Detokenizer(rendering)
        self._seen = SeenVersion()
        self._num_in_flight = 0
        self._admission = asyncio.Lock()

    async def process(self, owner: str, turn: TurnRecord) -> bool:
        """Replace a recorded turn by a sample; False if the claim was lost. Raises EngineError."""
        await self._admitted()
        try:
            sample = await self._sampled(turn)
            return await self._store.replace_by_sample(
                owner, turn.turn_id, sample, scope=self._scope
            )
        finally:
            self._num_in_flight -= 1

    async def _admitted(self) -> None:
        """Wait until one more sample may be under way, and count it."""
        async with self._admission:
            while True:
                counts = await self._store.counts()
                ahead = sum(counts[state] for state in _UNTRAINED) + self._num_in_flight
                if admit(ahead + 1, self._batch_size, 0, self._config.staleness_eta):
                    self._num_in_flight += 1
                    return
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _sampled(self, turn: TurnRecord) -> CapturedTurn:
        started = time.monotonic()
        left = self._config.max_new_tokens
        if self._context_length is not None:
            left = min(left, self._context_length - len(turn.prompt_ids))
        rollout = Rollout(
            prompt_ids=turn.prompt_ids,
            params=SamplingParams(
                temperature=self._config.temperature,
                max_new_tokens=max(left, 1),
                stop_token_ids=self._rendering.stop_token_ids,
            ),
            seen=self._seen,
            stops=StopStrings(self._rendering.decode, ()),
            routing_key=turn.session_id,
            pause_mode=self._pause_mode,
        )
        await rollout.run(self._engine)
        return self._captured(turn, rollout, time.monotonic() - started)

    def _captured(self, turn: TurnRecord, rollout: Rollout, latency_s: float) -> CapturedTurn:
        assert turn.recording is not None
        turn_id = uuid4().hex
        assembler = ReplyAssembler(
            self._detokenizer, prompt_ids=turn.prompt_ids, tools=turn.tools, turn_id=turn_id
        )
        _, reply = assembler.finish(rollout.ids)
        spans, version_fault = version_spans(rollout.spans, len(rollout.ids))
        modified = rollout.params.distribution_modified()
        circumstances = Circumstances(
            turn_type=turn.turn_type,
            may_train=True,
            is_ambiguous=False,
            distribution_modified=modified,
        )
        return CapturedTurn(
            turn_id=turn_id,
            session_id=turn.session_id,
            parent_turn_id=turn.parent_turn_id,
            turn_type=turn.turn_type,
            messages=turn.messages,
            tools=turn.tools,
            response=reply.message(),
            prompt_ids=turn.prompt_ids,
            response_ids=np.asarray(rollout.ids, dtype=np.int32),
            rollout_logprobs=np.asarray(rollout.logprobs, dtype=np.float32),
            token_parent_id=turn.turn_id,
            num_shared_ids=len(turn.prompt_ids),
            sampling=sampling_record(rollout),
            distribution_modified=modified,
            version_spans=spans,
            finish_reason=rollout.finish_reason or "abort",
            latency_s=latency_s,
            drop_reason=drop_reason(rollout, reply, circumstances, version_fault, self._proxy),
            teacher_key=turn.teacher_key,
            findings=turn.findings or {},
            recording=replace(turn.recording, kind=RecordingKind.RESAMPLED, votes=None),
        )
