"""Answers a prepared turn over ASGI: whole or as a stream, watching whether the client stays.

The given `Format` decides what the answer looks like.

Errors that come before the first byte keep their HTTP status; later ones are an event in the
stream. The turn is committed before the last chunk goes out. When the client leaves, the engine is
told to stop at once, and what has been sampled is recorded as `client_disconnected`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_proxy.errors import (
    ApiError,
    engine_unavailable,
    internal_error,
    invalid,
    shutting_down,
    turn_not_kept,
)
from api_proxy.generation import Rollout
from api_proxy.reply import wire
from api_proxy.reply.formats import EndedReply, Format, Logprobs, StreamWriter, num_reasoning_tokens
from api_proxy.reply.reply import Reply
from api_proxy.request.fields import header_of
from api_proxy.turn import Turn
from api_proxy.turns import TurnService
from rollout_bridge.engine.errors import (
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)

logger = logging.getLogger(__name__)

_ABORT_PATIENCE_S = 0.7
_KEEP_ALIVE_S = 15.0


class TurnResponse(Response, ABC):
    """The response to one request for a turn."""

    def __init__(self, service: TurnService, turn: Turn, wording: Format) -> None:
        super().__init__()
        self.service = service
        self.turn = turn
        self.turns = (turn, *turn.siblings)
        self.engine = service.deps.engine
        self.wording = wording
        self._work: asyncio.Task[None] | None = None

    @abstractmethod
    async def answer(self, send: Send) -> None:
        """Sample, record, send. Raises ApiError or EngineError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        self.service.metrics.in_flight.inc()
        self.service.in_flight.update({turn.turn_id: turn for turn in self.turns})
        self.service.replies.add(self)
        work = self._work = asyncio.create_task(self._answer_or_refuse(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._client_left(work)
            await work
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            self.service.replies.discard(self)
            self._leave_place()
            self.service.metrics.in_flight.dec()
            for turn in self.turns:
                del self.service.in_flight[turn.turn_id]
            if self.turn.client_gone:
                self.service.metrics.requests.labels("499").inc()
            self.service.metrics.request_s.observe(time.monotonic() - self.turn.started)

    async def _answer_or_refuse(self, send: Send) -> None:
        try:
            await self.answer(send)
        except (ApiError, EngineError) as error:
            self.service.left(self.turn)
            await self.refuse(send, as_api_error(error, self.service.config.retry_after_s))
        except asyncio.CancelledError:
            if not self.turn.client_gone and not self.turn.is_cut:
                raise
            # The engine did not hear the abort in time; closing the request ends it there.
            for turn in self.turns:
                await self.record_rest(turn)
            if self.turn.is_cut:
                await self.refuse(send, shutting_down(self.service.config.retry_after_s))

    async def refuse(self, send: Send, error: ApiError) -> None:
        """Send an error in place of the reply."""
        self.service.metrics.requests.labels(str(error.status)).inc()
        status, body = self.wording.refusal(error)
        await send_whole(send, status, body, error.headers)

    async def _client_left(self, work: asyncio.Task[None]) -> None:
        for turn in self.turns:
            turn.client_gone = True
        self.service.left(self.turn)
        await self._end_early(work)

    async def cut(self) -> None:
        """The proxy is stopping: end the reply here."""
        for turn in self.turns:
            turn.is_cut = True
        if self._work is not None and not self._work.done():
            await self._end_early(self._work)

    def _leave_place(self) -> None:
        if self.turn.place is not None:
            self.turn.place.used(sum(len(turn.rollout.ids) for turn in self.turns))
            self.turn.place.leave()
            self.turn.place = None

    async def _end_early(self, work: asyncio.Task[None]) -> None:
        """Abort at the engine; the work then ends by itself, and if not, it is cancelled."""
        abort = asyncio.create_task(self.break_off())
        await asyncio.wait({work}, timeout=_ABORT_PATIENCE_S)
        if not work.done():
            work.cancel()
        await abort

    async def break_off(self) -> None:
        """Tell the engine to end all that is being sampled."""
        aborts = [turn.rollout.cancel(self.engine) for turn in self.turns]
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, EngineError):
                logger.warning("abort of turn %s failed: %s", self.turn.turn_id, result)
            elif isinstance(result, BaseException):
                raise result

    def _broken_off(self, turn: Turn) -> ApiError | EngineError:
        """Why a reply has no end."""
        if turn.is_cut:
            return shutting_down(self.service.config.retry_after_s)
        return EngineUnavailable("the engine keeps interrupting the reply")

    def _check_kept(self, turn: Turn) -> None:
        """Raises ApiError 503 for a turn that was not kept: every answer must be kept."""
        if turn.is_lost:
            raise turn_not_kept(self.service.config.retry_after_s)

    async def record_rest(self, turn: Turn) -> Reply:
        """Record what was sampled; returns the reply as far as it goes."""
        rollout = turn.rollout
        _, reply = turn.assembler.finish(rollout.ids, rollout.matched_stop)
        await self.service.recorder.record(turn, reply)
        return reply

    def ended(self, turn: Turn, reply: Reply, logprobs: Logprobs | None) -> EndedReply:
        """The reply at its end, its tokens counted."""
        rollout = turn.rollout
        num_reasoning = num_reasoning_tokens(
            rollout.ids, reply.reasoning, self.service.deps.rendering.reasoning_end_id
        )
        return EndedReply(
            reply=reply,
            reason=rollout.finish_reason or "stop",
            matched_stop=rollout.matched_stop,
            usage=self._usage(rollout, num_reasoning),
            num_reasoning_tokens=num_reasoning,
            logprobs=logprobs,
        )

    def _usage(self, rollout: Rollout, num_reasoning: int) -> wire.Usage:
        usage = wire.Usage(
            prompt_tokens=len(rollout.prompt_ids),
            completion_tokens=len(rollout.ids),
            cached_tokens=rollout.num_cached_tokens,
            reasoning_tokens=num_reasoning,
        )
        tokens = self.service.metrics.tokens
        tokens.labels("prompt").inc(usage.prompt_tokens)
        tokens.labels("response").inc(usage.completion_tokens)
        tokens.labels("cached").inc(usage.cached_tokens)
        return usage

    def logprobs(self, turn: Turn, start: int) -> Logprobs | None:
        """Entries of the tokens from `start` on, if they were asked for and are known."""
        rollout = turn.rollout
        if not turn.completion.fields.logprobs or not np.isfinite(rollout.logprobs[start:]).all():
            return None
        top = rollout.top[start:] if turn.completion.fields.top_logprobs else None
        if top is not None and len(rollout.top) != len(rollout.ids):
            raise EngineProtocolError("the engine does not report the most probable tokens")
        ids, logprobs = rollout.ids[start:], rollout.logprobs[start:]
        tokens = self.service.token_bytes
        return wire.logprob_entries(tokens.decode, tokens.bytes_of, ids, logprobs, top)

    def reply_headers(self) -> dict[str, str]:
        """Which turn and session this is, and which fields of the request had no effect."""
        return {
            "x-turn-id": self.turn.turn_id,
            "x-session-id": self.turn.session_id,
            **header_of(self.turn.completion.ignored),
        }


class WholeResponse(TurnResponse):
    """The reply in one piece."""

    async def answer(self, send: Send) -> None:
        ended = await self.sampled(self.turn)
        if ended is not None:
            await self.send_reply(send, self.wording.whole(self.turn, ended))

    async def sampled(self, turn: Turn) -> EndedReply | None:
        """Sample and record one turn; None if the client left meanwhile. Raises EngineError."""
        rollout = turn.rollout
        try:
            await rollout.run(self.engine)
        except EngineError:
            if rollout.ids:
                await self.record_rest(turn)
            raise
        reply = await self.record_rest(turn)
        if turn.client_gone:
            return None
        self._check_kept(turn)
        if rollout.finish_reason == "abort":
            raise self._broken_off(turn)
        return self.ended(turn, reply, self.logprobs(turn, 0))

    async def send_reply(self, send: Send, body: dict[str, Any]) -> None:
        """The whole response."""
        self.service.metrics.requests.labels("200").inc()
        await send_whole(send, 200, body, self.reply_headers())


class StreamResponse(TurnResponse):
    """The reply as server-sent events, each as soon as its text is certain."""

    def __init__(self, service: TurnService, turn: Turn, wording: Format) -> None:
        super().__init__(service, turn, wording)
        self.writer = wording.writer(turn)
        self._is_started = False
        self._one_at_a_time = asyncio.Lock()
        self._num_listed: dict[str, int] = {}

    async def answer(self, send: Send) -> None:
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._stream(send)
        finally:
            keep_alive.cancel()

    async def refuse(self, send: Send, error: ApiError) -> None:
        """Send an error in place of the reply, or of the rest of it."""
        if not self._is_started:
            await super().refuse(send, error)
            return
        logger.warning("stream of turn %s broke off: %s", self.turn.turn_id, error.code)
        await self._send(send, self.writer.error(error))
        await self._send(send, b"", is_last=True)

    async def _stream(self, send: Send) -> None:
        ended = await self.streamed(self.turn, self.writer, send)
        if ended is not None:
            await self._send(send, self.writer.end(ended), is_last=True)

    async def streamed(self, turn: Turn, writer: StreamWriter, send: Send) -> EndedReply | None:
        """Sample, send and record one turn, except its end; None if the client left meanwhile.
        Raises EngineError.
        """
        rollout = turn.rollout
        is_first = True
        try:
            async with aclosing(rollout.stream(self.engine)) as pieces:
                async for ids, _ in pieces:
                    if is_first:
                        is_first = False
                        latency_s = time.monotonic() - turn.started
                        self.service.metrics.first_token_s.observe(latency_s)
                        await self._send(send, writer.start())
                    for delta in turn.assembler.push(ids):
                        await self._send(send, writer.delta(delta, self._new_logprobs(turn)))
        except EngineError:
            if rollout.ids:
                await self.record_rest(turn)
            raise
        deltas, reply = turn.assembler.finish(rollout.ids, rollout.matched_stop)
        for delta in deltas:
            await self._send(send, writer.delta(delta, self._new_logprobs(turn)))
        await self.service.recorder.record(turn, reply)
        if turn.client_gone:
            return None
        self._check_kept(turn)
        if rollout.finish_reason == "abort":
            raise self._broken_off(turn)
        return self.ended(turn, reply, self._new_logprobs(turn))

    def _new_logprobs(self, turn: Turn) -> Logprobs | None:
        """Entries of the tokens that no chunk listed yet, if they were asked for."""
        entries = self.logprobs(turn, self._num_listed.get(turn.turn_id, 0))
        if entries is not None:
            self._num_listed[turn.turn_id] = len(turn.rollout.ids)
        return entries

    async def _send(self, send: Send, data: bytes, is_last: bool = False) -> None:
        async with self._one_at_a_time:
            if self.turn.client_gone:
                return
            if not self._is_started:
                self._is_started = True
                self.service.metrics.requests.labels("200").inc()
                headers = {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                    **self.reply_headers(),
                }
                await send(_start(200, headers))
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _keep_alive(self, send: Send) -> None:
        """While the engine is silent (weights are loading), tell the client that the connection is
        alive.
        """
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            await self._send(send, self.writer.keep_alive)


def answer(service: TurnService, turn: Turn, wording: Format) -> TurnResponse:
    """The response to a prepared turn, streamed if the client asked for that."""
    kind = StreamResponse if turn.completion.fields.stream else WholeResponse
    return kind(service, turn, wording)


def as_api_error(error: ApiError | EngineError, retry_after_s: int) -> ApiError:
    """What the client is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return engine_unavailable(retry_after_s)
    if isinstance(error, EngineRejected) and 400 <= error.status < 500:
        if "context length" in error.message.lower() or "longer than" in error.message.lower():
            return invalid(error.message, "messages", "context_length_exceeded")
        return invalid(f"The model server refused the request: {error.message}")
    if isinstance(error, EngineProtocolError):
        logger.error("the engine breaks its contract: %s", error)
    return internal_error()


async def send_whole(send: Send, status: int, body: dict, headers: dict[str, str]) -> None:
    """A complete JSON response."""
    data = orjson.dumps(body)
    headers = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    await send(_start(status, headers))
    await send({"type": "http.response.body", "body": data})


def _start(status: int, headers: dict[str, str]) -> dict:
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def _disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
