"""The one client of every engine: SGLang or the embedded one, over HTTP.

It defines which requests there are; `wire` checks their replies, `transport` sends them. It knows
neither torch nor messages: ids go out, ids and log-probs come back.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from records.types import Ids, Logprobs
from rollout_bridge.engine import wire
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from rollout_bridge.engine.keys import EngineKeys
from rollout_bridge.engine.served import ServedSource, ServedVersion
from rollout_bridge.engine.server_info import ServerInfo, read_server_info
from rollout_bridge.engine.streaming import EventStream
from rollout_bridge.engine.transport import EngineTransport, TryAgain, routing_headers
from rollout_bridge.engine.types import (
    Generation,
    GenerationChunk,
    ModelInfo,
    PauseMode,
    SamplingParams,
    ScoredTokens,
)

logger = logging.getLogger(__name__)

TOKENS_STRETCH = 16
"""Positions of one request for given tokens: more have larger unions, fewer more requests."""
MOST_DRAWS = 64
"""Continuations of one request for several: the most that the embedded engine gives."""
Result = TypeVar("Result")


class EngineClient:
    """Client of the engine at `base_url`; create and use it inside one event loop.

    `vocab_size`: ids outside [0, vocab_size) raise ValueError before anything is sent. `keys`: sent
    with each request. `priority`: requests of this client start before those of clients with a
    lower one (the default is 0), if the engine supports priorities: the embedded one does, and
    SGLang with `--enable-priority-scheduling`; others ignore them. `served`: which adapter requests
    name; replies then carry its version in place of the base's label.
    """

    def __init__(
        self,
        base_url: str,
        *,
        config: EngineClientConfig | None = None,
        vocab_size: int | None = None,
        keys: EngineKeys | None = None,
        priority: int = 0,
        served: ServedSource | None = None,
    ):
        self.base_url = base_url.rstrip("/")
        self.config = config or EngineClientConfig()
        self.vocab_size = vocab_size
        self.keys = keys or EngineKeys()
        self.priority = priority
        self.served = served
        self._http = EngineTransport(self.base_url, self.config, self.keys)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def at(self, priority: int) -> EngineClient:
        """This client with another priority, on the same connections; closing one closes both."""
        other = copy.copy(self)
        other.priority = priority
        return other

    def naming(self, served: ServedSource) -> EngineClient:
        """This client with another choice of adapters, on the same connections."""
        other = copy.copy(self)
        other.served = served
        return other

    async def close(self) -> None:
        """Finish pending aborts and close the connections."""
        await self._http.close()

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

        `routing_key`: a router sends requests of one key to one engine. `cache_key`: prefixes are
        shared only with requests of the same key (the embedded engine needs none: it forgets them
        with the weights that made them).

        Raises ValueError (ids outside the vocabulary), EngineRejected (too long, bad parameters),
        EngineUnavailable, EngineProtocolError.
        """
        ids = wire.checked_ids(input_ids, self.vocab_size)
        base_id = request_id or uuid.uuid4().hex

        async def attempt(number: int, lora: dict[str, Any]) -> Any:
            rid = _attempt_id(base_id, number)
            try:
                return await self._http.request(
                    "POST",
                    "/generate",
                    self._generate_body(ids, params, rid, cache_key, stream=False) | lora,
                    timeout_s=self.config.total_timeout_s,
                    headers=routing_headers(routing_key),
                )
            except asyncio.CancelledError:
                self._http.abort_later(rid)
                raise

        try:
            reply, version = await self._with_adapter(attempt)
        except EngineRejected as refusal:
            if wire.is_early_abort(refusal):
                return wire.nothing_sampled(len(ids))
            raise
        found = wire.read_generation(reply, len(ids), self.config.routed_experts_topk)
        return wire.of_version(found, version)

    async def draw(
        self,
        input_ids: Sequence[int] | Ids,
        params: SamplingParams,
        number: int,
        *,
        routing_key: str | None = None,
    ) -> list[Generation]:
        """`number` independent continuations by one request, at most `MOST_DRAWS`; for short ones,
        since cancelling the call does not abort it. Raises like `generate`.
        """
        if not 1 <= number <= MOST_DRAWS:
            raise ValueError(f"number must be in [1, {MOST_DRAWS}], got {number}")
        ids = wire.checked_ids(input_ids, self.vocab_size)
        body = {
            "input_ids": ids,
            "sampling_params": params.to_wire() | {"n": number},
            "return_logprob": True,
        }
        if self.priority:
            body["priority"] = self.priority

        async def attempt(_: int, lora: dict[str, Any]) -> Any:
            return await self._http.request(
                "POST",
                "/generate",
                body | lora,
                timeout_s=self.config.total_timeout_s,
                headers=routing_headers(routing_key),
            )

        reply, version = await self._with_adapter(attempt)
        found = wire.read_generations(reply, len(ids), number)
        return [wire.of_version(one, version) for one in found]

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

        async def attempt(
            number: int, lora: dict[str, Any]
        ) -> tuple[EventStream, wire.StreamReader, GenerationChunk]:
            rid = _attempt_id(base_id, number)
            body = self._generate_body(ids, params, rid, cache_key, stream=True) | lora
            events, arrived = await self._http.open_stream(body, routing_key)
            reader = wire.StreamReader(len(ids), self.config.routed_experts_topk)
            try:
                return events, reader, reader.read(arrived)
            except EngineRejected:
                events.close()
                raise
            except EngineProtocolError:
                events.close()
                self._http.abort_later(rid)
                raise

        try:
            (events, reader, chunk), version = await self._with_adapter(attempt)
        except EngineRejected as refusal:
            if not wire.is_early_abort(refusal):
                raise
            final = wire.nothing_sampled(len(ids))
            yield GenerationChunk(new_ids=(), new_logprobs=(), final=final)
            return
        try:
            while True:
                final = None if chunk.final is None else wire.of_version(chunk.final, version)
                yield replace(chunk, final=final)
                if reader.finished:
                    await events.drain()
                    return
                arrived = await events.next(self.config.between_tokens_timeout_s)
                chunk = reader.read(arrived)
        finally:
            events.close()
            if not reader.finished:
                self._http.abort_later(events.request_id)

    async def score(
        self, input_ids: Sequence[int] | Ids, start: int, *, routing_key: str | None = None
    ) -> Logprobs:
        """Log-probs [len(input_ids) - start], temperature 1, of `input_ids[start:]`.

        `start` >= 1: the first token has no context to be scored under. Raises like `generate`.
        """
        ids, reply = await self._score(input_ids, start, 0, routing_key)
        return wire.read_score(reply, ids, start, self.vocab_size)

    async def score_with_topk(
        self, input_ids: Sequence[int] | Ids, start: int, k: int, *, routing_key: str | None = None
    ) -> ScoredTokens:
        """What `score` returns, and ids [R, k] and log-probs [R, k] of the k most probable tokens
        at the same positions. Raises like `generate`.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        ids, reply = await self._score(input_ids, start, k, routing_key)
        logprobs = wire.read_score(reply, ids, start, self.vocab_size)
        topk_ids, topk_logprobs = wire.read_score_topk(reply, ids, start, k)
        return ScoredTokens(logprobs=logprobs, topk_ids=topk_ids, topk_logprobs=topk_logprobs)

    async def score_tokens(
        self,
        input_ids: Sequence[int] | Ids,
        start: int,
        token_ids: Ids,
        *,
        routing_key: str | None = None,
    ) -> Logprobs:
        """Log-probs [R, K], temperature 1, of `token_ids` [R, K] at the positions of
        `input_ids[start:]`, R of them. Raises like `generate`.

        An engine takes one list of ids for all positions of a request. So each request covers
        `TOKENS_STRETCH` positions and asks for the union of their ids.
        """
        ids = wire.checked_ids(input_ids, self.vocab_size)
        if len(token_ids) != len(ids) - start:
            raise ValueError(f"ids at {len(token_ids)} positions of {len(ids) - start}")
        found: list[Logprobs] = []
        for first in range(0, len(token_ids), TOKENS_STRETCH):
            wanted = token_ids[first : first + TOKENS_STRETCH]
            union, places = np.unique(wanted, return_inverse=True)
            asked = wire.checked_ids(union, self.vocab_size)
            at = start + first
            cut = ids[: at + len(wanted)]
            cut, reply = await self._score(cut, at, 0, routing_key, token_ids=asked)
            scores = wire.read_score_tokens(reply, cut, at, asked)
            found.append(np.take_along_axis(scores, places.reshape(wanted.shape), axis=-1))
        return np.concatenate(found)

    async def update_weights(self, path: str, version: str, *, flush_cache: bool = True) -> None:
        """Load the weights in folder `path` and label them `version`.

        `flush_cache=False` only while the engine is paused, and its cache is empty or its mode is
        `in_place`. Raises EngineRejected when the folder cannot be loaded; the engine then keeps
        its weights and label. With `flush_cache` SGLang also refuses, after it has changed both,
        while requests stand in the way: unpaused, it waits for them instead.
        """
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        reply = await self._http.control("/update_weights_from_disk", body)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRejected(400, wire.error_message(reply, "weights were not updated"))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in folder `path` under a name that no other adapter ever has; does
        nothing if it is already loaded. Raises EngineRejected when it cannot be loaded.
        """
        body = {"lora_name": name, "lora_path": path}
        try:
            reply = await self._http.control("/load_lora_adapter", body)
        except EngineRejected as refusal:
            # A second request: the answer to the first got lost, or another process sent it.
            if refusal.status == 404 or name not in await self.adapters():
                raise
            return
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRejected(400, wire.error_message(reply, "the adapter was not loaded"))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its running requests end normally. Raises EngineRejected for an
        unknown one.
        """
        reply = await self._http.control("/unload_lora_adapter", {"lora_name": name})
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineRejected(400, wire.error_message(reply, "the adapter was not unloaded"))

    async def adapters(self) -> list[str]:
        """Names of the adapters that are loaded; one try."""
        return wire.read_adapters(await self._http.probe("/v1/models"))

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating; new requests wait until `resume`, they are not refused."""
        await self._http.control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._http.control("/continue_generation", {})

    async def abort(self, request_id: str) -> None:
        """Stop a request; it finishes with reason `abort`. Unknown ids are ignored."""
        await self._http.abort(request_id)

    async def flush_cache(self) -> None:
        """Forget cached prefixes. Raises EngineRejected while requests run, or while a request's
        grammar is being compiled.
        """
        await self._http.control("/flush_cache", {})

    async def model_info(self) -> ModelInfo:
        """What is served now; one try, so that it can be polled. With `served`, the label is that
        of the serving version.
        """
        info = await self.base_info()
        version = None if self.served is None else self.served.current()
        return info if version is None else replace(info, weight_version=version.label)

    async def base_info(self) -> ModelInfo:
        """What the engine itself reports, adapters aside; one try."""
        # SGLang's router knows only the older name, and asks one of its servers.
        info = await self._http.probe("/model_info", "/get_model_info")
        models = None
        if isinstance(info, dict) and info.get("context_length") is None:
            models = await self._http.probe("/v1/models")
        return wire.read_model_info(info, models)

    async def server_info(self) -> ServerInfo:
        """What kind of engine this is, its version, and reasons not to use it; one try."""
        return read_server_info(await self._http.probe("/server_info", "/get_server_info"))

    async def served_vocab_size(self) -> int | None:
        """Rows of the served model's head, which the server names when it refuses an id beyond.

        None if it does not. Only for servers whose `ServerInfo.checks_vocabulary` is True: an older
        one fails on such an id.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
        }
        timeout_s = self.config.probe_timeout_s
        try:
            await self._http.request("POST", "/generate", body, timeout_s=timeout_s)
        except EngineRejected as refusal:
            found = re.search(r"valid range is \[0, (\d+)\)", refusal.message)
            return int(found.group(1)) if found else None
        return None

    async def _score(
        self,
        input_ids: Sequence[int] | Ids,
        start: int,
        top_k: int,
        routing_key: str | None,
        *,
        token_ids: Sequence[int] = (),
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
        if token_ids:
            body["token_ids_logprob"] = list(token_ids)

        async def attempt(number: int, lora: dict[str, Any]) -> Any:
            reply = await self._http.request(
                "POST",
                "/generate",
                body | lora,
                timeout_s=self.config.score_timeout_s,
                headers=routing_headers(routing_key),
            )
            if wire.is_aborted(reply):
                raise TryAgain("/generate: the engine aborted a scoring request")
            return reply

        reply, _ = await self._with_adapter(attempt)
        return ids, reply

    async def _with_adapter(
        self, attempt: Callable[[int, dict[str, Any]], Awaitable[Result]]
    ) -> tuple[Result, ServedVersion | None]:
        """The result of an attempt that names the adapter serving at that moment, and its version;
        tried again like `EngineTransport.with_retries`.

        An engine that was restarted has no adapters: the request that finds this out loads the one
        it named, and tries again.
        """
        named: list[ServedVersion | None] = []

        async def with_current(number: int) -> Result:
            version = None if self.served is None else self.served.current()
            named.append(version)
            adapter = None if version is None else version.adapter
            if adapter is None:
                return await attempt(number, {})
            try:
                return await attempt(number, {"lora_path": adapter.name})
            except EngineRejected as refusal:
                if adapter.name in await self.adapters():
                    if adapter.name not in str(refusal):
                        raise
                    # Another request has loaded it since.
                    return await attempt(number, {"lora_path": adapter.name})
                logger.warning("%s lacks adapter %s: %s", self.base_url, adapter.name, refusal)
                try:
                    await self.load_adapter(adapter.name, adapter.path)
                except EngineRejected as again:
                    raise EngineUnavailable(f"adapter {adapter.name}: {again}") from refusal
                return await attempt(number, {"lora_path": adapter.name})

        result = await self._http.with_retries(with_current)
        return result, named[-1]

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
        if params.top_logprobs:
            body["top_logprobs_num"] = params.top_logprobs
        if self.config.routed_experts_topk:
            body["return_routed_experts"] = True
        if cache_key is not None:
            body["extra_key"] = cache_key
        if self.priority:
            body["priority"] = self.priority
        return body


def _attempt_id(request_id: str, number: int) -> str:
    """A server may still know the id of a broken attempt, so each attempt has its own."""
    return request_id if number == 1 else f"{request_id}_retry{number - 1}"
