"""The one client of every engine: SGLang or the embedded one, over HTTP.

One pooled aiohttp session; every wait is finite; transport errors and 5xx are tried again, never
after the first token of a stream. Replies are checked in `wire`. It knows neither torch nor
messages: ids go out, ids and log-probs come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson
import tenacity
from numpy.typing import NDArray

from records.types import Ids, Logprobs
from rollout_bridge.engine import wire
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import (
    EngineError,
    EngineRejected,
    EngineUnavailable,
)
from rollout_bridge.engine.server_info import ServerInfo, read_server_info
from rollout_bridge.engine.streaming import EventStream
from rollout_bridge.engine.types import (
    ROUTING_HEADER,
    Generation,
    GenerationChunk,
    ModelInfo,
    PauseMode,
    SamplingParams,
    ScoredTokens,
)

Result = TypeVar("Result")


class _TryAgain(EngineUnavailable):
    """A failure that another attempt may cure."""


class EngineClient:
    """Client of the engine at `base_url`; make it and use it inside one event loop.

    `vocab_size`: ids outside [0, vocab_size) raise ValueError before anything is sent.
    """

    def __init__(
        self,
        base_url: str,
        *,
        config: EngineClientConfig | None = None,
        vocab_size: int | None = None,
    ):
        self.base_url = base_url.rstrip("/")
        self.config = config or EngineClientConfig()
        self.vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish pending aborts and close the connections."""
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> Generation:
        """Sample a continuation. Cancelling the call aborts the request on the engine.

        `routing_key`: requests of one key go to one engine behind a router. `cache_key`: prefixes
        are shared only with requests of the same key (the embedded engine needs none: it forgets
        them with the weights that made them).

        Raises ValueError (ids outside the vocabulary), EngineRejected (too long, bad parameters),
        EngineUnavailable, EngineProtocolError.
        """
        ids = wire.checked_ids(input_ids, self.vocab_size)
        base_id = request_id or uuid.uuid4().hex

        async def attempt(number: int) -> Any:
            rid = _attempt_id(base_id, number)
            try:
                return await self._request(
                    "POST",
                    "/generate",
                    self._generate_body(ids, params, rid, cache_key, stream=False),
                    timeout_s=self.config.total_timeout_s,
                    headers=_routing(routing_key),
                )
            except asyncio.CancelledError:
                self._abort_later(rid)
                raise

        reply = await self._with_retries(attempt)
        return wire.read_generation(reply, len(ids), self.config.routed_experts_topk)

    async def stream(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Sample a continuation, token by token; the last chunk carries `final`.

        Closing the iterator early aborts the request on the engine. Keys and errors as in
        `generate`.
        """
        ids = wire.checked_ids(input_ids, self.vocab_size)
        base_id = request_id or uuid.uuid4().hex

        async def attempt(number: int) -> tuple[EventStream, Any]:
            rid = _attempt_id(base_id, number)
            body = self._generate_body(ids, params, rid, cache_key, stream=True)
            return await self._open_stream(body, routing_key)

        events, event = await self._with_retries(attempt)
        reader = wire.StreamReader(len(ids), self.config.routed_experts_topk)
        try:
            while True:
                yield reader.read(event)
                if reader.finished:
                    await events.drain()
                    return
                event = await events.next(self.config.between_tokens_timeout_s)
        finally:
            events.close()
            if not reader.finished:
                self._abort_later(events.request_id)

    async def score(
        self, input_ids: Sequence[int] | Ids, start: int, *, routing_key: str | None = None
    ) -> Logprobs:
        """Log-probs [len(input_ids) - start], temperature 1, of `input_ids[start:]`.

        `start` >= 1: the first token has no context to be scored under. Raises as `generate`.
        """
        ids, reply = await self._score(input_ids, start, 0, routing_key)
        return wire.read_score(reply, ids, start, self.vocab_size)

    async def score_topk(
        self, input_ids: Sequence[int] | Ids, start: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids [R, k] and log-probs [R, k] of the k most probable tokens at positions start.. ."""
        scored = await self.score_with_topk(input_ids, start, k)
        assert scored.topk_ids is not None
        assert scored.topk_logprobs is not None
        return scored.topk_ids, scored.topk_logprobs

    async def score_with_topk(
        self, input_ids: Sequence[int] | Ids, start: int, k: int, *, routing_key: str | None = None
    ) -> ScoredTokens:
        """What `score` and `score_topk` give, from one request."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        ids, reply = await self._score(input_ids, start, k, routing_key)
        logprobs = wire.read_score(reply, ids, start, self.vocab_size)
        topk_ids, topk_logprobs = wire.read_score_topk(reply, ids, start, k)
        return ScoredTokens(logprobs=logprobs, topk_ids=topk_ids, topk_logprobs=topk_logprobs)

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = True) -> None:
        """Load the weights in folder `path` and label them `version`.

        `flush_cache=False` only together with a pause in mode `in_place`. Raises EngineRejected
        when the folder cannot be loaded; the engine then keeps its weights and label.
        """
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        reply = await self._control("/update_weights_from_disk", body)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRejected(400, wire.error_message(reply, "weights were not updated"))

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating; new requests wait until `resume`, they are not refused."""
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._control("/continue_generation", {})

    async def abort(self, request_id: str) -> None:
        """Stop a request; it finishes with reason `abort`. Unknown ids are ignored."""
        await self._request(
            "POST", "/abort_request", {"rid": request_id}, timeout_s=self.config.probe_timeout_s
        )

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""
        await self._control("/flush_cache", {})

    async def health(self) -> bool:
        """True if the engine answers 200 in time; a paused SGLang does not."""
        try:
            await self._request("GET", "/health", None, timeout_s=self.config.probe_timeout_s)
        except EngineError:
            return False
        return True

    async def model_info(self) -> ModelInfo:
        """What is served now; one try, so that it can be polled."""
        # SGLang's router knows the older name only, and asks one of its servers.
        info = await self._probe("/model_info", "/get_model_info")
        models = None
        if isinstance(info, dict) and info.get("context_length") is None:
            models = await self._probe("/v1/models")
        return wire.read_model_info(info, models)

    async def server_info(self) -> ServerInfo:
        """What kind of engine this is, how old, and what speaks against using it; one try."""
        return read_server_info(await self._probe("/server_info", "/get_server_info"))

    async def served_vocab_size(self) -> int | None:
        """Rows of the served model's head, as the server says them in refusing an id beyond.

        None where it does not. Only for servers whose `ServerInfo.checks_vocabulary` is True: an
        older one fails over such an id.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
        }
        timeout_s = self.config.probe_timeout_s
        try:
            await self._request("POST", "/generate", body, timeout_s=timeout_s)
        except EngineRejected as refusal:
            found = re.search(r"valid range is \[0, (\d+)\)", refusal.message)
            return int(found.group(1)) if found else None
        return None

    async def _probe(self, *paths: str) -> Any:
        """What the first of `paths` that exists answers."""
        for path in paths[:-1]:
            try:
                return await self._request("GET", path, None, timeout_s=self.config.probe_timeout_s)
            except EngineRejected as refusal:
                if refusal.status != 404:
                    raise
        return await self._request("GET", paths[-1], None, timeout_s=self.config.probe_timeout_s)

    async def _score(
        self, input_ids: Sequence[int] | Ids, start: int, top_k: int, routing_key: str | None
    ) -> tuple[list[int], Any]:
        ids = wire.checked_ids(input_ids, self.vocab_size)
        if not 1 <= start < len(ids):
            raise ValueError(f"start must be in [1, {len(ids) - 1}], got {start}")
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        if top_k:
            body["top_logprobs_num"] = top_k

        async def attempt(number: int) -> Any:
            reply = await self._request(
                "POST",
                "/generate",
                body,
                timeout_s=self.config.score_timeout_s,
                headers=_routing(routing_key),
            )
            if wire.is_aborted(reply):
                raise _TryAgain("/generate: the engine broke off a scoring request")
            return reply

        return ids, await self._with_retries(attempt)

    def _generate_body(
        self,
        ids: list[int],
        params: SamplingParams,
        rid: str,
        cache_key: str | None,
        *,
        stream: bool,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": ids,
            "sampling_params": params.to_wire(),
            "return_logprob": True,
            "stream": stream,
        }
        if self.config.routed_experts_topk:
            body["return_routed_experts"] = True
        if cache_key is not None:
            body["extra_key"] = cache_key
        return body

    async def _control(self, path: str, body: dict[str, Any]) -> Any:
        async def attempt(number: int) -> Any:
            return await self._request("POST", path, body, timeout_s=self.config.control_timeout_s)

        return await self._with_retries(attempt)

    async def _with_retries(self, attempt: Callable[[int], Awaitable[Result]]) -> Result:
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.config.attempts),
            wait=tenacity.wait_exponential_jitter(
                multiplier=self.config.retry_wait_s,
                max=self.config.retry_wait_max_s,
                jitter=self.config.retry_wait_s,
            ),
            retry=tenacity.retry_if_exception_type(_TryAgain),
            reraise=True,
        )
        async for try_ in retrying:
            with try_:
                return await attempt(try_.retry_state.attempt_number)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """One attempt; returns the parsed body (text where it is not JSON)."""
        session = self._open_session()
        data = None if body is None else orjson.dumps(body)
        try:
            async with session.request(
                method,
                self.base_url + path,
                data=data,
                headers={"Content-Type": "application/json", **(headers or {})},
                timeout=self._timeout(timeout_s),
            ) as response:
                content = await response.read()
        except (aiohttp.ServerTimeoutError, aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineUnavailable(f"{path}: no answer within {timeout_s} s") from error
            raise _TryAgain(f"{path}: {type(error).__name__}: {error}") from error
        return _checked_body(path, response.status, content)

    async def _open_stream(
        self, body: dict[str, Any], routing_key: str | None
    ) -> tuple[EventStream, Any]:
        """Send, and wait for the first event."""
        session = self._open_session()
        opened: EventStream | None = None
        try:
            async with asyncio.timeout(self.config.first_token_timeout_s):
                response = await session.post(
                    self.base_url + "/generate",
                    data=orjson.dumps(body),
                    headers={"Content-Type": "application/json", **_routing(routing_key)},
                    timeout=self._timeout(self.config.total_timeout_s),
                )
                opened = EventStream(response, body["rid"])
                if response.status != 200:
                    _checked_body("/generate", response.status, await response.read())
                event = await opened.next(self.config.first_token_timeout_s)
        except BaseException as error:
            # Whatever ended the wait, cancellation included, the engine must not go on alone.
            if opened is not None:
                opened.close()
                if not isinstance(error, EngineRejected):
                    self._abort_later(body["rid"])
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineUnavailable(
                    f"no first token within {self.config.first_token_timeout_s} s"
                ) from error
            if isinstance(error, aiohttp.ClientError | OSError) or (
                type(error) is EngineUnavailable
            ):
                raise _TryAgain(f"/generate: {type(error).__name__}: {error}") from error
            raise
        return opened, event

    def _abort_later(self, request_id: str) -> None:
        async def abort() -> None:
            # An engine that cannot be reached has dropped the request with its connection.
            with contextlib.suppress(EngineError):
                await self.abort(request_id)

        task = asyncio.get_running_loop().create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _timeout(self, total_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=self.config.connect_timeout_s)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self.config.pool_size, keepalive_timeout=30, ttl_dns_cache=300
                )
            )
        return self._session


def _checked_body(path: str, status: int, content: bytes) -> Any:
    """The body of a 2xx answer; raises _TryAgain for 5xx and EngineRejected for the rest."""
    try:
        body = orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        body = content.decode("utf-8", "replace")
    if 200 <= status < 300:
        return body
    message = wire.error_message(body, str(body)[:500] if body else "no message")
    if status >= 500:
        raise _TryAgain(f"{path}: {status}: {message}")
    raise EngineRejected(status, message)


def _attempt_id(request_id: str, number: int) -> str:
    """A server may still hold the id of a broken attempt, so each attempt has its own."""
    return request_id if number == 1 else f"{request_id}_retry{number - 1}"


def _routing(routing_key: str | None) -> dict[str, str]:
    return {} if routing_key is None else {ROUTING_HEADER: routing_key}
