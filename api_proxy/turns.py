"""The life of one request between the route and the store.

`prepare` links the request, builds its prompt and starts writing what the request itself tells (the
session goes on; an earlier turn got its next state) while the engine samples. `record` commits
the turn before its reply's end goes out. A store that does not answer never costs the agent its
reply: it is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np

from api_proxy.capture import Circumstances, drop_reason, sampling_record, version_spans
from api_proxy.config import ProxyConfig
from api_proxy.errors import invalid
from api_proxy.forcing import CallForcer
from api_proxy.generation import Engine, Rollout, SeenVersion
from api_proxy.lineage import Lineage, LineageFinder
from api_proxy.linking import Link
from api_proxy.metrics import ProxyMetrics
from api_proxy.reply import Reply
from api_proxy.sampling import reply_budget, sampling_params
from api_proxy.schemas import Completion
from api_proxy.sessions import Sessions, scope_of
from api_proxy.side_turns import turn_type_of
from api_proxy.streaming import ReplyAssembler, marker_ids
from api_proxy.tokens import ParentTokens, Prompt, PromptBuilder, TokenCache
from records.errors import StoreError
from records.store import Store
from records.types import CapturedTurn, TurnType
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.rendering import Rendering

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDeps:
    """What the proxy stands on. `clock` gives unix seconds."""

    store: Store
    engine: Engine
    rendering: Rendering
    config: ProxyConfig
    clock: Callable[[], float] = time.time


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request that is being answered."""

    turn_id: str
    completion: Completion
    scope: str
    session_id: str
    link: Link
    prompt: Prompt
    turn_type: TurnType
    rollout: Rollout
    assembler: ReplyAssembler
    distribution_modified: str | None
    created: float
    started: float = field(default_factory=time.monotonic)
    client_gone: bool = False
    notes: asyncio.Task[None] | None = None


class TurnService:
    """Prepares and records turns; one for each application."""

    def __init__(self, deps: ProxyDeps) -> None:
        config = deps.config
        self.deps = deps
        self.config = config
        self.metrics = ProxyMetrics()
        self.sessions = Sessions(deps.store, config.idle_timeout_s, config.sweep_interval_s)
        self._lineage = LineageFinder(deps.store, config.idle_timeout_s, config.link_candidates)
        self._cache = TokenCache(config.token_cache_tokens)
        self._prompts = PromptBuilder(
            deps.store, deps.rendering, self._cache, config.render_offload_chars
        )
        self._forcer = CallForcer(deps.rendering)
        self._marker_ids = marker_ids(deps.rendering)
        self._seen = SeenVersion()
        self._context_length = config.context_length
        self._tasks: set[asyncio.Task[Any]] = set()

    async def prepare(self, completion: Completion, authorization: str | None) -> Turn:
        """Everything up to sampling. Raises ApiError."""
        scope = scope_of(authorization)
        now = self.deps.clock()
        lineage = await self._find(scope, completion, now)
        link = lineage.link
        forced_ids = self._forcer.forced_ids(completion.fields)
        prompt = await self._prompt(link, completion)
        prompt_ids = np.concatenate([prompt.ids, np.asarray(forced_ids, dtype=np.int32)])
        budget = reply_budget(
            completion.requested_tokens,
            self.config.max_output_tokens,
            len(prompt_ids),
            await self._context(),
        )
        params = sampling_params(completion, budget, self.deps.rendering.stop_token_ids)
        session_id = lineage.session_id or self.sessions.new_id()
        turn = Turn(
            turn_id=uuid4().hex,
            completion=completion,
            scope=scope,
            session_id=session_id,
            link=link,
            prompt=prompt,
            turn_type=turn_type_of(completion, self.config.side_rules),
            rollout=Rollout(
                prompt_ids=prompt_ids,
                params=params,
                seen=self._seen,
                routing_key=session_id,
                max_continuations=self.config.max_continuations,
            ),
            assembler=ReplyAssembler(
                self.deps.rendering,
                prompt_ids=prompt.ids,
                marker_ids=self._marker_ids,
                tools=completion.tools,
                stop=completion.stop,
                forced_ids=forced_ids,
                allow_calls=bool(completion.tools) and completion.fields.tool_choice != "none",
            ),
            distribution_modified="forced_prefix" if forced_ids else params.distribution_modified(),
            created=now,
        )
        self.metrics.linked(lineage)
        self.metrics.bridge.labels(prompt.how).inc()
        turn.notes = self._spawn(self._note(turn))
        return turn

    async def _find(self, scope: str, completion: Completion, now: float) -> Lineage:
        """The request's lineage; without the store, that of a conversation never seen."""
        try:
            async with asyncio.timeout(self.config.record_timeout_s):
                session_id = None
                if completion.session is not None:
                    session_id = await self.sessions.named(scope, completion.session)
                return await self._lineage.find(
                    scope=scope, messages=completion.messages, session_id=session_id, now=now
                )
        except (StoreError, TimeoutError) as error:
            self.metrics.failed_lookups.inc()
            logger.error("request not linked, the store does not answer: %s", error)
            return Lineage(link=Link(), session_id=None, has_history=False)

    async def _prompt(self, link: Link, completion: Completion) -> Prompt:
        try:
            return await self._prompts.build(link, completion.messages, completion.tools)
        except ValueError as error:
            logger.info("messages refused by the chat template: %s", type(error).__name__)
            raise invalid(
                "The model's chat template cannot render these messages.", "messages"
            ) from error
        except StoreError as error:
            self.metrics.failed_lookups.inc()
            logger.error("prompt rendered in full, the store does not answer: %s", error)
            return await self._prompts.build(Link(), completion.messages, completion.tools)

    async def _context(self) -> int | None:
        """The context length: configured, or what the engine says, asked once."""
        if self._context_length is None:
            try:
                self._context_length = (await self.deps.engine.model_info()).context_length
            except EngineError as error:
                logger.warning("context length unknown, the engine does not answer: %s", error)
        return self._context_length

    async def _note(self, turn: Turn) -> None:
        """Write what the request itself tells."""
        await self._keep_session(turn)
        parent = turn.link.parent
        if parent is None or not turn.link.next_state:
            return
        try:
            taken = await self.deps.store.set_next_state(parent.turn_id, list(turn.link.next_state))
        except StoreError as error:
            self.metrics.failed_next_states.inc()
            logger.error("next state of turn %s lost: %s", parent.turn_id, error)
            return
        if taken:
            self.metrics.next_states.inc()

    async def _keep_session(self, turn: Turn) -> bool:
        try:
            await self.sessions.seen(turn.scope, turn.session_id)
        except StoreError as error:
            logger.warning("session not noted: %s", error)
            return False
        return True

    async def record(self, turn: Turn, reply: Reply) -> None:
        """Commit the turn, if anything was sampled; wait for it, but not for ever."""
        if turn.assembler.mismatched:
            self.metrics.mismatches.inc()
            logger.warning("turn %s: streamed text differs from the final parse", turn.turn_id)
        self.metrics.continuations.inc(turn.rollout.num_continuations)
        commit = self._spawn(self._commit(turn, reply))
        done, _ = await asyncio.wait({commit}, timeout=self.config.record_timeout_s)
        if not done:
            logger.error("turn %s is not committed yet, its reply ends anyway", turn.turn_id)

    async def _commit(self, turn: Turn, reply: Reply) -> None:
        if turn.notes is not None:
            await turn.notes
        if turn.rollout.ids:
            captured = self.captured(turn, reply)
            try:
                await self._store_turn(turn, captured)
            except (StoreError, ValueError) as error:
                self.metrics.failed_turns.inc()
                logger.error("turn %s was not stored: %s", turn.turn_id, error)
            else:
                self.metrics.recorded(captured.drop_reason)
                self._remember(captured)
        if turn.completion.session_done:
            await self._close(turn)

    async def _store_turn(self, turn: Turn, captured: CapturedTurn) -> None:
        try:
            await self.deps.store.record_turn(captured, scope=turn.scope)
        except ValueError:
            # The session may be missing because its own write failed; anything else fails again.
            if not await self._keep_session(turn):
                raise
            await self.deps.store.record_turn(captured, scope=turn.scope)

    async def _close(self, turn: Turn) -> None:
        try:
            await self.deps.store.close_session(turn.session_id, "done")
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
            )
        )

    def captured(self, turn: Turn, reply: Reply) -> CapturedTurn:
        """The turn as the store takes it."""
        rollout = turn.rollout
        spans, version_fault = version_spans(rollout.spans, len(rollout.ids))
        circumstances = Circumstances(
            turn_type=turn.turn_type,
            is_ambiguous=turn.link.ambiguous,
            distribution_modified=turn.distribution_modified,
            client_gone=turn.client_gone,
        )
        parent = turn.link.parent
        return CapturedTurn(
            turn_id=turn.turn_id,
            session_id=turn.session_id,
            parent_turn_id=parent.turn_id if parent else None,
            turn_type=turn.turn_type,
            messages=turn.completion.messages,
            tools=turn.completion.tools,
            response=reply.message(),
            prompt_ids=rollout.prompt_ids,
            response_ids=np.asarray(rollout.ids, dtype=np.int32),
            rollout_logprobs=np.asarray(rollout.logprobs, dtype=np.float32),
            token_parent_id=turn.prompt.token_parent_id,
            num_shared_ids=turn.prompt.num_shared_ids,
            sampling=sampling_record(rollout, turn.completion.fields.seed),
            distribution_modified=turn.distribution_modified,
            version_spans=spans,
            finish_reason=rollout.finish_reason or "abort",
            latency_s=time.monotonic() - turn.started,
            drop_reason=drop_reason(rollout, reply, circumstances, version_fault, self.config),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives its request; kept here so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Wait for what is still being committed."""
        while self._tasks:
            await asyncio.wait(self._tasks)
