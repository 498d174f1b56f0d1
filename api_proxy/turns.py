"""From a checked request to a turn that can be sampled: its lineage, its session, its prompt.

Writing what the request itself brings (its session continues; an earlier turn got its next state)
begins at the same time. If the store does not answer, the request is answered unlinked, and linked
when its turn is stored: that is counted and logged, and costs the agent nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

import numpy as np

from api_proxy.access.body_budget import BodyBudget
from api_proxy.access.callers import Caller
from api_proxy.access.hold import GenerationHold
from api_proxy.access.limits import Limits
from api_proxy.access.places import Places
from api_proxy.access.request_limits import RequestLimits
from api_proxy.deps import ProxyDeps
from api_proxy.errors import ApiError, invalid, too_long_to_record, unsupported
from api_proxy.generation import Rollout, SeenVersion
from api_proxy.linking.lineage import Lineage, LineageFinder
from api_proxy.linking.linking import Link
from api_proxy.linking.sessions import Sessions
from api_proxy.linking.side_turns import Kind, kind_of, rules_of
from api_proxy.linking.tokens import Prompt, PromptBuilder, TokenCache
from api_proxy.linking.workers import Workers
from api_proxy.metrics import ProxyMetrics
from api_proxy.recording.drop_watch import DropWatch
from api_proxy.recording.recorder import TurnRecorder
from api_proxy.recording.spool import Spool
from api_proxy.reply.open_replies import OpenReplies
from api_proxy.reply.stop_strings import StopStrings
from api_proxy.reply.streaming import Detokenizer, ReplyAssembler
from api_proxy.reply.text_reply import TextAssembler
from api_proxy.reply.token_bytes import TokenBytes
from api_proxy.request.completion import Completion
from api_proxy.request.forcing import Constraint, ReplyShaper
from api_proxy.request.sampling import reply_budget, sampling_params
from api_proxy.server.worker_metrics import WorkerMetrics
from api_proxy.turn import Assembler, Turn
from records.errors import StoreError
from records.keys import Keys
from records.messages import path_ids
from records.names import Consent, TurnType
from records.types import Ids
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.engine.types import SamplingParams
from rollout_bridge.rendering.templates.errors import Unrenderable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Speaker:
    """What one setting of the chat template needs besides its rendering."""

    shaper: ReplyShaper
    detokenizer: Detokenizer


class TurnService:
    """Prepares turns, and holds what the parts of one application share."""

    def __init__(self, deps: ProxyDeps) -> None:
        config = deps.config
        self.deps = deps
        self.config = config
        self.metrics = ProxyMetrics()
        deps.store.redactor.on_found = self.metrics.found
        self.in_flight: dict[str, Turn] = {}
        """Turns that are being answered, by their id."""
        for reply, is_streamed in (("streamed", True), ("whole", False)):
            gauge = self.metrics.longest_wait_s.labels(reply)
            gauge.set_function(partial(self._longest_wait_s, is_streamed))
        self.limits = Limits(deps.clock, self.metrics, deps.sharing)
        self.workers = Workers(config.render_offload_chars)
        self.bodies = BodyBudget(config)
        keys = Keys(deps.store, deps.clock)
        hold = GenerationHold(deps.hold, self.metrics)
        self.places = Places(keys, self.limits, self.metrics, config, hold)
        self.replies = OpenReplies()
        self.closing = asyncio.Event()
        """Set when the endpoint is told to stop."""
        self.sessions = Sessions(
            deps.store, config.idle_timeout_s, config.sweep_interval_s, deps.sharing
        )
        self._side_rules = rules_of(config)
        self._lineage = LineageFinder(
            deps.store,
            config.idle_timeout_s,
            config.link_candidates,
            {rule.name for rule in self._side_rules if rule.is_summary},
            self.workers,
            deps.sharing,
        )
        cache = TokenCache(config.token_cache_tokens)
        self._prompts = PromptBuilder(deps.store, deps.rendering, cache, self.workers)
        self._speakers: dict[bool | None, _Speaker] = {}
        self.token_bytes = TokenBytes(deps.rendering)
        self._seen = SeenVersion()
        self._context_length = config.context_length
        self.spool = Spool(
            store=deps.store,
            sessions=self.sessions,
            lineage=self._lineage,
            metrics=self.metrics,
            retry_s=config.spill_retry_s,
            sharing=deps.sharing,
        )
        self.drop_watch = DropWatch(
            deps.store,
            self.metrics,
            config.sweep_interval_s,
            says_later=deps.sharing.is_first,
        )
        self.worker_metrics: WorkerMetrics | None = None
        """For the other workers of the endpoint, if there are any."""
        if deps.sharing.workers > 1 and deps.metrics_folder is not None:
            self.worker_metrics = WorkerMetrics(
                self.metrics.registry, deps.metrics_folder, deps.sharing.number
            )
        self.recorder = TurnRecorder(
            store=deps.store,
            sessions=self.sessions,
            lineage=self._lineage,
            spool=self.spool,
            cache=cache,
            metrics=self.metrics,
            watch=self.drop_watch,
            config=config,
            routes=deps.routes,
        )

    async def prepare(self, completion: Completion, caller: Caller) -> Turn:
        """Everything up to sampling. Raises ApiError."""
        now = self.deps.clock()
        kind = kind_of(completion, self._side_rules)
        is_side = kind.turn_type is TurnType.SIDE
        has_next_state = not is_side and caller.consent is Consent.TRAIN
        lineage = await self._find(caller, completion, now, has_next_state)
        try:
            turn = await self._build(completion, caller, lineage, now, kind)
        except ApiError:
            # Refused, so its next state is not written.
            if lineage.link.parent is not None and has_next_state:
                self._lineage.forget(lineage.link.parent.turn_id)
            raise
        if is_side:
            self.metrics.side_turns.labels(kind.rule).inc()
        else:
            self.metrics.linked(lineage)
        self.metrics.bridge.labels(turn.prompt.how).inc()
        self.recorder.start(turn)
        return turn

    def left(self, turn: Turn) -> None:
        """Note that the turn ended without an answer that its client has read."""
        if turn.first_node is not None:
            self._lineage.left(turn.first_node, turn.session_id)

    async def refuse_too_long(self, completion: Completion, caller: Caller) -> None:
        """Raises ApiError for more text than is searched before it is stored."""
        if caller.consent is Consent.NONE:
            return
        limit = await self.workers.run(
            completion.num_bytes,
            self.deps.store.redactor.refused_length,
            completion.messages,
            completion.tools,
        )
        if limit is not None:
            self.metrics.too_long.inc()
            raise too_long_to_record(limit)

    async def stop(self) -> None:
        """Begin no more replies, and end the open ones."""
        self.closing.set()
        self.places.close()
        await self.replies.close(self.config.shutdown_grace_s)

    async def count_prompt_tokens(self, completion: Completion) -> int:
        """Tokens of the prompt, rendered in full. Raises ApiError."""
        ids = (await self._prompt(Link(), completion)).ids
        constraint = await self._constraint(completion, ids)
        return len(ids) + len(constraint.forced_ids)

    @property
    def request_limits(self) -> RequestLimits:
        """What a request may contain, as far as that is known without asking the engine."""
        return RequestLimits(config=self.config, context_length=self._context_length)

    async def limits_for(self, num_bytes: int) -> RequestLimits:
        """What a request may contain; the engine is asked if this one is long enough to matter."""
        if num_bytes > self.config.render_offload_chars:
            await self._ask_engine()
        return self.request_limits

    async def context_length(self) -> int | None:
        """Tokens of prompt and reply together; None until the engine has reported it."""
        await self._ask_engine()
        return self._context_length

    def _longest_wait_s(self, is_streamed: bool) -> float:
        now = time.monotonic()
        waits = [
            now - turn.rollout.heard_at
            for turn in self.in_flight.values()
            if bool(turn.completion.fields.stream) is is_streamed
        ]
        return max(waits, default=0.0)

    async def _build(
        self, completion: Completion, caller: Caller, lineage: Lineage, now: float, kind: Kind
    ) -> Turn:
        link = lineage.link
        prompt = await self._prompt(link, completion)
        constraint = await self._constraint(completion, prompt.ids)
        forced_ids = np.asarray(constraint.forced_ids, dtype=np.int32)
        prompt_ids = np.concatenate([prompt.ids, forced_ids])
        await self._ask_engine()
        budget = reply_budget(
            completion.requested_tokens,
            self.config.max_output_tokens,
            len(prompt_ids),
            self._context_length,
        )
        params = sampling_params(
            completion,
            budget,
            self._stop_token_ids(completion, constraint),
            constraint.grammar,
            self.deps.rendering.vocab_size,
        )
        modified = params.distribution_modified()
        if constraint.forced_ids and constraint.grammar is None:
            modified = "forced_prefix"
        session_id = lineage.session_id or self.sessions.new_id()

        def choice(number: int) -> Turn:
            turn_id = uuid4().hex
            return Turn(
                turn_id=turn_id,
                completion=completion,
                caller=caller,
                session_id=session_id,
                is_session_kept=lineage.session_id is not None and not lineage.is_repeated,
                is_link_deferred=lineage.is_deferred,
                link=link,
                path=lineage.path,
                first_node=lineage.first_node,
                prompt=prompt,
                kind=kind,
                rollout=self._rollout(
                    prompt_ids, _seeded(params, number), session_id, completion, caller
                ),
                assembler=self._assembler(turn_id, prompt.ids, constraint, completion),
                distribution_modified=modified,
                created=now,
                choice=number,
            )

        turn = choice(0)
        turn.siblings = tuple(choice(number) for number in range(1, completion.fields.n or 1))
        for one in (turn, *turn.siblings):
            turn.unfinished.add(one.turn_id)
            one.unfinished = turn.unfinished
        return turn

    async def _constraint(self, completion: Completion, prompt_ids: Ids) -> Constraint:
        return await self.workers.run(
            completion.num_bytes,
            self._speaker(completion).shaper.constraint,
            completion,
            prompt_ids,
        )

    def _rollout(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        session_id: str,
        completion: Completion,
        caller: Caller,
    ) -> Rollout:
        return Rollout(
            prompt_ids=prompt_ids,
            params=params,
            seen=self._seen,
            stops=StopStrings(self.deps.rendering.decode, completion.stop),
            routing_key=session_id,
            cache_scope=caller.cache_scope,
            max_continuations=self.config.max_continuations,
            pause_mode=self.deps.pause_mode,
        )

    def _assembler(
        self, turn_id: str, prompt_ids: Ids, constraint: Constraint, completion: Completion
    ) -> Assembler:
        if completion.prompt_ids is not None:
            return TextAssembler(self._speaker(completion).detokenizer, completion.stop)
        return ReplyAssembler(
            self._speaker(completion).detokenizer,
            prompt_ids=prompt_ids,
            tools=completion.tools,
            stop=completion.stop,
            forced_ids=constraint.forced_ids,
            allow_calls=bool(completion.tools) and completion.fields.tool_choice != "none",
            turn_id=turn_id,
        )

    def _stop_token_ids(self, completion: Completion, constraint: Constraint) -> tuple[int, ...]:
        """What ends a reply; also the end of a call, if only one is allowed and no grammar enforces
        that.
        """
        stops = self.deps.rendering.stop_token_ids
        fields = completion.fields
        may_call = bool(completion.tools) and fields.tool_choice != "none"
        if fields.parallel_tool_calls is False and may_call and constraint.grammar is None:
            return (*stops, self._speaker(completion).shaper.call_end_id())
        return stops

    async def _find(
        self, caller: Caller, completion: Completion, now: float, has_next_state: bool
    ) -> Lineage:
        """The request's lineage; if the store does not answer, it is found later."""
        if caller.consent is Consent.NONE:
            return Lineage(link=Link(), session_id=None, has_history=False)
        deferred = Lineage(link=Link(), session_id=None, has_history=False, is_deferred=True)
        if self.spool.is_waiting:
            return deferred
        try:
            async with asyncio.timeout(self.config.record_timeout_s):
                session_id = None
                if completion.session is not None:
                    session_id = await self.sessions.named(caller.scope, completion.session)
                path = await self.workers.run(
                    completion.num_bytes, path_ids, caller.scope, completion.messages
                )
                return await self._lineage.find(
                    scope=caller.scope,
                    messages=completion.messages,
                    path=path,
                    session_id=session_id,
                    now=now,
                    parent_turn_id=completion.parent_turn_id,
                    has_next_state=has_next_state,
                )
        except (StoreError, TimeoutError) as error:
            self.metrics.failed_lookups.inc()
            why = error if isinstance(error, StoreError) else "within proxy.record_timeout_s"
            logger.error("request not linked yet because the store does not answer: %s", why)
            return deferred
        except RecursionError:
            raise invalid("The messages are nested too deeply.", "messages") from None

    def _speaker(self, completion: Completion) -> _Speaker:
        """What reads and forces replies under the request's template. Raises ApiError 400 if the
        template has no such switch.
        """
        thinking = completion.fields.enable_thinking
        known = self._speakers.get(thinking)
        if known is None:
            try:
                rendering = self.deps.rendering.with_thinking(thinking)
            except ValueError as error:
                name = "chat_template_kwargs.enable_thinking"
                raise unsupported(f"'{name}' is not supported: {error}.", name) from None
            known = _Speaker(ReplyShaper(rendering), Detokenizer(rendering))
            self._speakers[thinking] = known
        return known

    async def _prompt(self, link: Link, completion: Completion) -> Prompt:
        if completion.prompt_ids is not None:
            return Prompt(ids=np.asarray(completion.prompt_ids, dtype=np.int32), how="full")
        self._speaker(completion)
        try:
            return await self._prompts.build(link, completion)
        except (ValueError, RecursionError) as error:
            logger.info("messages refused by the chat template: %s", type(error).__name__)
            said = "The model's chat template cannot render these messages."
            if isinstance(error, Unrenderable):
                said = f"{str(error)[0].upper()}{str(error)[1:]}."
            raise invalid(said, "messages") from error
        except StoreError as error:
            self.metrics.failed_lookups.inc()
            logger.error("prompt rendered in full because the store does not answer: %s", error)
            return await self._prompts.build(Link(), completion)

    async def _ask_engine(self) -> None:
        """Ask for what must be known about the engine before it is used, until it answers."""
        needs_label = self.deps.pause_mode == "in_place" and self._seen.label is None
        if self._context_length is not None and not needs_label:
            return
        try:
            info = await self.deps.engine.model_info()
        except EngineError as error:
            logger.warning("context length unknown because the engine does not answer: %s", error)
            return
        if self._context_length is None:
            self._context_length = info.context_length
        if self._seen.label is None:
            self._seen.label = info.weight_version


def _seeded(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of one of several choices: with one seed they would all be the same."""
    if params.seed is None or number == 0:
        return params
    return replace(params, seed=(params.seed + number + 2**63) % 2**64 - 2**63)
