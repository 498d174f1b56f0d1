"""On-policy distillation on recorded states: the policy answers a recorded prompt again.

The sample takes the place and the verdict of the recorded turn: the hint says what the answer to
this prompt should have been, whoever gives it. Sampling waits while it is too far ahead of training
(ALGORITHMS 6.2). What is kept of a reply, and whether it may train, is decided as for live turns.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from api_proxy.config import ProxyConfig
from api_proxy.generation import GeneratingEngine
from opd.rehearsal.policy_sampler import PolicySampler
from opd.replay.config import ReplayConfig
from records.names import TurnState
from records.store import Store
from records.training.staleness import admit
from records.turns.recording import RecordingKind
from records.types import CapturedTurn, TurnRecord
from rollout_bridge.engine.types import PauseMode
from rollout_bridge.rendering.rendering import Rendering

_LOOK_EVERY_S = 0.25
_UNTRAINED = (TurnState.READY, TurnState.LEASED)


class PolicyResampler:
    """Samples from the policy's engine. `scope` is that of the recorded sessions."""

    def __init__(
        self,
        store: Store,
        engine: GeneratingEngine,
        rendering: Rendering,
        config: ReplayConfig,
        *,
        scope: str,
        batch_size: int,
        context_length: int | None,
        pause_mode: PauseMode,
        proxy: ProxyConfig,
    ) -> None:
        self._store, self._config = store, config
        self._scope, self._batch_size = scope, batch_size
        self._sampler = PolicySampler(
            engine,
            rendering,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            context_length=context_length,
            pause_mode=pause_mode,
            proxy=proxy,
        )
        self._num_in_flight = 0
        self._admission = asyncio.Lock()

    async def process(self, owner: str, turn: TurnRecord) -> bool:
        """Replace a recorded turn by samples; False if the claim was lost. Raises EngineError; a
        later try takes the samples that are there into account.
        """
        wanted = await self._num_samples(turn)
        done = await self._store.samples_of(turn.turn_id)
        # One at least, even if the task has become easier since an earlier try.
        for number in range(min(done + 1, wanted), wanted + 1):
            await self._admitted()
            try:
                sample = await self._sampled(turn)
                kept = await self._store.replace_by_sample(
                    owner, turn.turn_id, sample, scope=self._scope, is_last=number == wanted
                )
            finally:
                self._num_in_flight -= 1
            if not kept:
                return False
        return True

    async def _num_samples(self, turn: TurnRecord) -> int:
        most = self._config.hard_samples
        if most == 1:
            return 1
        return num_samples(most, await self._store.recorded_pass_rate(turn.session_id))

    async def _admitted(self) -> None:
        """Wait until one more sample may be in progress, and count it."""
        async with self._admission:
            while True:
                counts = await self._store.counts()
                ahead = sum(counts[state] for state in _UNTRAINED) + self._num_in_flight
                if admit(ahead + 1, self._batch_size, 0, self._config.staleness_eta):
                    self._num_in_flight += 1
                    return
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _sampled(self, turn: TurnRecord) -> CapturedTurn:
        assert turn.recording is not None
        answer = await self._sampler.answer(
            turn.prompt_ids,
            turn.tools,
            turn_type=turn.turn_type,
            routing_key=turn.session_id,
            enable_thinking=turn.sampling.get("enable_thinking"),
        )
        rollout = answer.rollout
        return CapturedTurn(
            turn_id=answer.turn_id,
            session_id=turn.session_id,
            parent_turn_id=turn.parent_turn_id,
            turn_type=turn.turn_type,
            messages=turn.messages,
            tools=turn.tools,
            response=answer.message,
            prompt_ids=turn.prompt_ids,
            response_ids=np.asarray(rollout.ids, dtype=np.int32),
            rollout_logprobs=np.asarray(rollout.logprobs, dtype=np.float32),
            token_parent_id=turn.turn_id,
            num_shared_ids=len(turn.prompt_ids),
            sampling=answer.sampling,
            distribution_modified=answer.distribution_modified,
            version_spans=answer.version_spans,
            finish_reason=rollout.finish_reason or "abort",
            latency_s=answer.latency_s,
            drop_reason=answer.drop,
            teacher_key=turn.teacher_key,
            data_source=turn.data_source,
            findings=turn.findings or {},
            recording=replace(turn.recording, kind=RecordingKind.RESAMPLED, votes=None),
        )


def num_samples(most: int, pass_rate: float | None) -> int:
    """How often a prompt is answered: 1 + (most - 1)(1 - p), rounded, for a task that was done at
    the rate p in [0, 1]; once if that is unknown (ALGORITHMS 8.4).
    """
    return 1 if pass_rate is None else 1 + round((most - 1) * (1 - pass_rate))
