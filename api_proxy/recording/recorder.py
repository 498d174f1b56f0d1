"""Writes turns: what a request brings while it is answered, and the turn itself at its end.

A store that does not answer costs the agent nothing: what it does not take is spilled (spool.py).
The request fails only if the spill file does not take it either, or the store refuses the turn for
good: every answer must be kept. The content of a request is never logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np

from api_proxy.config import ProxyConfig
from api_proxy.linking.lineage import LineageFinder
from api_proxy.linking.sessions import Sessions
from api_proxy.linking.tokens import ParentTokens, TokenCache
from api_proxy.metrics import ProxyMetrics
from api_proxy.recording.capture import (
    Circumstances,
    drop_reason,
    sampling_record,
    version_spans,
    whole_experts,
)
from api_proxy.recording.drop_watch import DropWatch
from api_proxy.recording.spool import Spool
from api_proxy.reply.reply import Reply
from api_proxy.turn import Turn
from records.errors import StoreError, StoreUnavailable
from records.names import Consent, TurnType
from records.spill.spilled import Addition
from records.store import Store
from records.types import CapturedTurn
from rollout_bridge import tracing
from rollout_bridge.config import TeacherRoutes

logger = logging.getLogger(__name__)


class TurnRecorder:
    """Commits turns and next states; one for each application."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        lineage: LineageFinder,
        cache: TokenCache,
        spool: Spool,
        metrics: ProxyMetrics,
        watch: DropWatch,
        config: ProxyConfig,
        routes: TeacherRoutes,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._lineage = lineage
        self._cache = cache
        self._spool = spool
        self._metrics = metrics
        self._watch = watch
        self._config, self._routes = config, routes
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, turn: Turn) -> None:
        """Begin to write what the request itself brings, while the engine samples."""
        if turn.caller.consent is Consent.NONE:
            return
        notes = self._spawn(self._note(turn))
        for one in (turn, *turn.siblings):
            one.notes = notes

    async def _note(self, turn: Turn) -> None:
        if turn.is_link_deferred:
            return
        if not turn.is_session_kept:
            await self._keep_session(turn)
        if turn.answers is None:
            return
        try:
            taken = await self._store.set_next_state(
                turn.answers, list(turn.link.next_state), turn.link.echo_changes
            )
        except StoreUnavailable:
            if not await self._spool.add(self._addition(turn, None)):
                self._lineage.forget(turn.answers)
                self._metrics.failed_next_states.inc()
            return
        except (StoreError, ValueError) as error:
            self._lineage.forget(turn.answers)
            self._metrics.failed_next_states.inc()
            logger.error("next state of turn %s lost: %s", turn.answers, type(error).__name__)
            return
        if taken:
            self._metrics.next_states.inc()

    async def _keep_session(self, turn: Turn) -> bool:
        try:
            await self._sessions.create(turn.scope, turn.session_id)
        except StoreError as error:
            logger.warning("session of turn %s not stored: %s", turn.turn_id, error)
        else:
            turn.is_session_kept = True
        return turn.is_session_kept

    async def record(self, turn: Turn, reply: Reply) -> None:
        """Commit the turn, if anything was sampled; after a while without the store, spill it.

        A turn is committed once, even if its reply is cut off during the commit. If nothing takes
        it, it `is_lost`: its reply must not end as if it were kept.
        """
        if turn.caller.consent is Consent.NONE:
            self._leave_out(turn)
            return
        if turn.commit is None:
            turn.commit = self._begin_commit(turn, reply)
        done, _ = await asyncio.wait({turn.commit}, timeout=self._config.record_timeout_s)
        if not done:
            logger.error("turn %s is not committed yet; its reply ends anyway", turn.turn_id)
            if turn.captured is not None:
                await self._spill(turn, turn.captured)
        elif not turn.commit.cancelled() and turn.commit.exception() is not None:
            turn.is_lost = True  # logged and counted when the task ended

    def _leave_out(self, turn: Turn) -> None:
        """Keep nothing of the turn; count it once."""
        if turn.turn_id in turn.unfinished and turn.rollout.ids:
            turn.unfinished.discard(turn.turn_id)
            self._metrics.unrecorded.inc()

    def _begin_commit(self, turn: Turn, reply: Reply) -> asyncio.Task[None]:
        if turn.assembler.mismatched:
            self._metrics.mismatches.inc()
            logger.warning("turn %s: streamed text differs from the final parse", turn.turn_id)
        self._metrics.continuations.inc(turn.rollout.num_continuations)
        turn.latency_s = time.monotonic() - turn.started
        if turn.rollout.ids:
            try:
                turn.captured = captured_turn(turn, reply, self._config, self._routes)
            except ValueError as error:  # the engine's spans contradict themselves
                self._lost(turn, error)
        if tracing.is_on() and turn.captured is not None:
            _trace_request(turn, turn.captured, self._config.model_name)
        return self._spawn(self._commit(turn))

    async def _commit(self, turn: Turn) -> None:
        if turn.notes is not None:
            await asyncio.wait({turn.notes})
        if turn.captured is not None:
            began = time.time()
            await self._store_turn(turn, turn.captured)
            tracing.turn_span(turn.turn_id, "record", began, {"opd.spilled": turn.is_spilled})
        turn.unfinished.discard(turn.turn_id)
        if turn.completion.session_done and not turn.unfinished:
            await self._close(turn)

    async def _store_turn(self, turn: Turn, captured: CapturedTurn) -> None:
        try:
            captured = await self._store.redacted_turn(captured, turn.scope)
            if self._spool.is_waiting:
                await self._spill(turn, captured)
            elif turn.is_link_deferred:
                await self._spool.store_addition(self._addition(turn, captured))
            else:
                await self._record(turn, captured)
        except StoreUnavailable:
            await self._spill(turn, captured)
        except (StoreError, ValueError, RecursionError) as error:
            # ValueError: the turn contradicts itself; RecursionError: something in the request is
            # nested too deeply to be written.
            self._lost(turn, error)
            if turn.completion.session is not None:
                # It may have been deleted; the next request of that name starts it anew.
                self._sessions.forget_names()
            return
        if captured.identity is None:
            self._remember(captured)

    async def _record(self, turn: Turn, captured: CapturedTurn) -> None:
        if not turn.is_session_kept and not await self._keep_session(turn):
            raise StoreUnavailable("its session could not be written")
        await self._store.record_turn(
            captured, scope=turn.scope, parent_length=turn.prompt.parent_length
        )
        self._metrics.recorded(captured.drop_reason)
        if captured.turn_type is TurnType.MAIN:
            self._watch.recorded(
                turn.caller, captured.session_id, captured.drop_reason, captured.drop_detail
            )

    def _lost(self, turn: Turn, error: Exception) -> None:
        """The store has refused the turn for good. If its request is sent again, it begins a new
        session, because this one may be deleted.
        """
        turn.is_lost = True
        turn.first_node = None
        self._metrics.failed_turns.inc()
        logger.error("turn %s was not stored: %s", turn.turn_id, error)

    async def _spill(self, turn: Turn, captured: CapturedTurn) -> None:
        """Keep a turn outside the store, once, with the next state that its request carried."""
        if turn.is_spilled:
            return
        turn.is_spilled = True
        if not await self._spool.add(self._addition(turn, captured)):
            turn.is_lost = True
            self._metrics.failed_turns.inc()

    def _addition(self, turn: Turn, captured: CapturedTurn | None) -> Addition:
        return Addition(
            scope=turn.scope,
            created_at=turn.created,
            turn=captured,
            answers=turn.answers,
            next_state=turn.link.next_state if turn.answers else (),
            echo_changes=turn.link.echo_changes if turn.answers else (),
            session_name=turn.completion.session,
            continues=turn.completion.parent_turn_id,
            is_deferred=turn.is_link_deferred,
        )

    async def _close(self, turn: Turn) -> None:
        try:
            await self._store.close_session(turn.session_id, "done")
        except StoreError as error:
            # The idle sweep closes it later.
            logger.warning("session not closed: %s", error)

    def _remember(self, captured: CapturedTurn) -> None:
        self._cache.add(
            ParentTokens(
                turn_id=captured.turn_id,
                prompt_ids=captured.prompt_ids,
                response_ids=captured.response_ids,
                tools=captured.tools,
                enable_thinking=captured.sampling.get("enable_thinking"),
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives its request; kept here so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Expected errors are handled in the task. The text may quote the request: not logged.
            self._metrics.failed_turns.inc()
            logger.error("writing a turn failed: %s", type(error).__name__)

    async def drain(self) -> None:
        """Wait for what is still being committed."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def captured_turn(
    turn: Turn, reply: Reply, config: ProxyConfig, routes: TeacherRoutes
) -> CapturedTurn:
    """The turn as the store takes it. Raises ValueError if the engine contradicts itself."""
    rollout = turn.rollout
    spans, version_fault = version_spans(rollout.spans, len(rollout.ids))
    circumstances = Circumstances(
        turn_type=turn.turn_type,
        may_train=turn.caller.consent is Consent.TRAIN,
        is_ambiguous=turn.link.ambiguous,
        distribution_modified=turn.distribution_modified,
        client_gone=turn.client_gone,
        is_cut=turn.is_cut,
    )
    parent = turn.link.parent
    return CapturedTurn(
        turn_id=turn.turn_id,
        session_id=turn.session_id,
        parent_turn_id=parent.turn_id if parent else None,
        turn_type=turn.turn_type,
        messages=turn.completion.messages,
        tools=turn.completion.tools,
        response=reply.message() if turn.turn_type is not TurnType.TEXT else reply.text_message(),
        prompt_ids=rollout.prompt_ids,
        response_ids=np.asarray(rollout.ids, dtype=np.int32),
        rollout_logprobs=np.asarray(rollout.logprobs, dtype=np.float32),
        token_parent_id=turn.prompt.token_parent_id,
        num_shared_ids=turn.prompt.num_shared_ids,
        sampling=sampling_record(rollout, turn.completion.fields.enable_thinking),
        distribution_modified=turn.distribution_modified,
        version_spans=spans,
        finish_reason=rollout.finish_reason or "abort",
        latency_s=turn.latency_s,
        drop_reason=drop_reason(rollout, reply, circumstances, version_fault, config),
        drop_detail=turn.kind.rule,
        teacher_key=turn.completion.teacher or _routed(turn, routes),
        data_source=turn.completion.source,
        request_echo=turn.completion.request_echo if turn.completion.is_retrievable else None,
        user_id=turn.completion.user_id,
        routed_experts=whole_experts(rollout),
        path=turn.path,
    )


def _trace_request(turn: Turn, captured: CapturedTurn, model: str) -> None:
    """Without a word of what was said."""
    attributes: tracing.Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.response.id": turn.turn_id,
        "gen_ai.conversation.id": turn.session_id,
        "gen_ai.usage.input_tokens": len(captured.prompt_ids),
        "gen_ai.usage.output_tokens": len(captured.response_ids),
        "opd.turn_type": captured.turn_type.value,
        "opd.finish_reason": captured.finish_reason,
    }
    if captured.version_spans:
        attributes["opd.version"] = captured.version_spans[-1].version
    if captured.drop_reason is not None:
        attributes["opd.drop_reason"] = captured.drop_reason.value
    ended = turn.created + turn.latency_s
    tracing.request_span(turn.turn_id, turn.created, ended, attributes, turn.completion.traceparent)


def _routed(turn: Turn, routes: TeacherRoutes) -> str | None:
    """The teacher that the configuration names for such turns."""
    key = turn.caller.key
    return routes.teacher_of(
        source=turn.completion.source,
        key=None if key is None else key.name,
        tools=[tool["function"]["name"] for tool in turn.completion.tools],
    )
