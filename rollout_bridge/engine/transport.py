"""HTTP to one engine: one pooled aiohttp session, finite waits, retries where they may help.

Transport errors and 5xx are tried again, but never after the first token of a stream. A request
that nobody waits for any more is aborted. It knows routes, not what their bodies mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import orjson
import tenacity

from rollout_bridge.engine import wire
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineError, EngineRejected, EngineUnavailable
from rollout_bridge.engine.keys import EngineKeys
from rollout_bridge.engine.streaming import EventStream
from rollout_bridge.engine.types import ROUTING_HEADER

Result = TypeVar("Result")


class TryAgain(EngineUnavailable):
    """A failure that another attempt may cure."""


class EngineTransport:
    """Connections to the engine at `base_url`; used inside one event loop."""

    def __init__(self, base_url: str, config: EngineClientConfig, keys: EngineKeys) -> None:
        self._base_url = base_url
        self._config = config
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish pending aborts and close the connections."""
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def abort(self, request_id: str) -> None:
        """Stop a request; one attempt."""
        await self.request(
            "POST", "/abort_request", {"rid": request_id}, timeout_s=self._config.probe_timeout_s
        )

    async def probe(self, *paths: str) -> Any:
        """The answer of the first of `paths` that exists."""
        for path in paths[:-1]:
            try:
                return await self.request("GET", path, None, timeout_s=self._config.probe_timeout_s)
            except EngineRejected as refusal:
                if refusal.status != 404:
                    raise
        return await self.request("GET", paths[-1], None, timeout_s=self._config.probe_timeout_s)

    async def control(self, path: str, body: dict[str, Any]) -> Any:
        """Make the engine do something; with retries."""

        async def attempt(number: int) -> Any:
            return await self.request("POST", path, body, timeout_s=self._config.control_timeout_s)

        return await self.with_retries(attempt)

    async def with_retries(self, attempt: Callable[[int], Awaitable[Result]]) -> Result:
        """Call `attempt` (with its number, from 1) until it does not raise TryAgain, or until the
        last attempt.
        """
        # Almost every request needs one attempt, and nothing to count further ones with.
        try:
            return await attempt(1)
        except TryAgain as error:
            failure = error
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.attempts),
            wait=tenacity.wait_exponential_jitter(
                multiplier=self._config.retry_wait_s,
                max=self._config.retry_wait_max_s,
                jitter=self._config.retry_wait_s,
            ),
            retry=tenacity.retry_if_exception_type(TryAgain),
            reraise=True,
        )
        async for try_ in retrying:
            number = try_.retry_state.attempt_number
            with try_:
                if number == 1:
                    raise failure
                return await attempt(number)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """One attempt; returns the parsed body (text if it is not JSON)."""
        session = self._open_session()
        data = None if body is None else orjson.dumps(body)
        try:
            async with session.request(
                method,
                self._base_url + path,
                data=data,
                headers=self._headers(path, headers or {}),
                timeout=self._timeout(timeout_s),
            ) as response:
                content = await response.read()
        except (aiohttp.ServerTimeoutError, aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineUnavailable(f"{path}: no answer within {timeout_s} s") from error
            raise TryAgain(f"{path}: {type(error).__name__}: {error}") from error
        return _checked_body(path, response.status, content)

    async def open_stream(
        self, body: dict[str, Any], routing_key: str | None
    ) -> tuple[EventStream, list[bytes]]:
        """Send, and wait for the first events."""
        session = self._open_session()
        opened: EventStream | None = None
        try:
            async with asyncio.timeout(self._config.first_token_timeout_s):
                response = await session.post(
                    self._base_url + "/generate",
                    data=orjson.dumps(body),
                    headers=self._headers("/generate", routing_headers(routing_key)),
                    timeout=self._timeout(self._config.total_timeout_s),
                )
                opened = EventStream(response, body["rid"])
                if response.status != 200:
                    _checked_body("/generate", response.status, await response.read())
                arrived = await opened.next(self._config.first_token_timeout_s)
        except BaseException as error:
            # Whatever ended the wait, even cancellation, the engine must not go on alone.
            if opened is not None:
                opened.close()
                if not isinstance(error, EngineRejected):
                    self.abort_later(body["rid"])
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineUnavailable(
                    f"no first token within {self._config.first_token_timeout_s} s"
                ) from error
            if isinstance(error, aiohttp.ClientError | OSError) or (
                type(error) is EngineUnavailable
            ):
                raise TryAgain(f"/generate: {type(error).__name__}: {error}") from error
            raise
        return opened, arrived

    def abort_later(self, request_id: str) -> None:
        """Stop a request in the background; `close` waits for it."""

        async def abort() -> None:
            # An engine that cannot be reached has dropped the request with its connection.
            with contextlib.suppress(EngineError):
                await self.abort(request_id)

        task = asyncio.get_running_loop().create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _headers(self, path: str, more: dict[str, str]) -> dict[str, str]:
        return {"Content-Type": "application/json", **self._keys.headers(path), **more}

    def _timeout(self, total_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, sock_connect=self._config.connect_timeout_s)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._config.pool_size, keepalive_timeout=30, ttl_dns_cache=300
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _checked_body(path: str, status: int, content: bytes) -> Any:
    """The body of a 2xx answer; raises TryAgain for 5xx and EngineRejected for the rest."""
    try:
        body = orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        body = content.decode("utf-8", "replace")
    if 200 <= status < 300:
        return body
    message = wire.error_message(body, str(body)[:500] if body else "no message")
    if status >= 500:
        raise TryAgain(f"{path}: {status}: {message}")
    raise EngineRejected(status, message)


def routing_headers(routing_key: str | None) -> dict[str, str]:
    """The header by which a router sends requests of one key to one server."""
    return {} if routing_key is None else {ROUTING_HEADER: routing_key}
