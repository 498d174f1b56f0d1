"""One call to the judge: streamed, retried if that may help, its failures told apart.

The reply is streamed so that its first token is noticed: from then on the prompt is in the server's
prefix cache. A server that answers in one piece works too. Retries here bridge brief failures:
transport errors, 429 and 5xx, a few times. Independent of votes.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError
from pydantic import BaseModel, Field, ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from judge.config import JudgeConfig
from rollout_bridge.engine.types import ROUTING_HEADER

# How servers (OpenAI, SGLang, vLLM, llama.cpp, ours) say that a prompt does not fit.
_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum context|too long|longer than|too many tokens",
    re.I,
)
_EVENT_STREAM = "text/event-stream"
_DONE = "[DONE]"


def judge_client(config: JudgeConfig) -> AsyncOpenAI:
    """A client of the judge, which the caller keeps open. `JudgeCall` does the retries."""
    return AsyncOpenAI(
        base_url=config.base_url,
        api_key=config.api_key.get_secret_value(),
        timeout=config.timeout_s,
        max_retries=0,
    )


class JudgeCallError(Exception):
    """One call gave no usable reply.

    `retryable`: the next try may succeed. `too_long`: the server says that the prompt exceeds its
    context. `retry_after_s`: how long the server asks to be left alone.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool,
        too_long: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.too_long = too_long
        self.retry_after_s = retry_after_s


class _Details(BaseModel):
    cached_tokens: int | None = None


class Usage(BaseModel):
    """What a reply cost, as the server reports it."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the server's cache; None if it does not report them."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """The text of a reply, without its reasoning, and its cost if the server reports it. `is_cut`:
    it ended at its token limit.
    """

    text: str
    usage: Usage | None
    is_cut: bool = False


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Whole(BaseModel):
    """The needed fields of a chat completion. The client itself accepts any JSON as one."""

    choices: list[_Choice] = Field(min_length=1)
    usage: Usage | None = None


class _ChunkChoice(BaseModel):
    delta: dict[str, Any]
    finish_reason: str | None = None


class _EventError(BaseModel):
    message: str
    code: int | str | None = None


class _Chunk(BaseModel):
    """The needed fields of one event of a streamed chat completion: a part of it, or its
    failure.
    """

    choices: list[_ChunkChoice] = []
    usage: Usage | None = None
    error: _EventError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One question to the judge. `on_start` is called when the first try has its first token, or
    has ended without one; later calls have no meaning.
    """

    client: AsyncOpenAI
    messages: Sequence[dict[str, str]]
    config: JudgeConfig
    routing_key: str | None = None
    on_start: Callable[[], object] = lambda: None

    async def reply(self) -> JudgeReply:
        """Ask until there is a reply or no hope. Raises JudgeCallError."""
        config = self.config

        def worth_retrying(error: BaseException) -> bool:
            return (
                isinstance(error, JudgeCallError)
                and error.retryable
                and (error.retry_after_s or 0.0) <= config.retry_wait_max_s
            )

        backoff = wait_random_exponential(config.retry_wait_s, config.retry_wait_max_s)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked_for = error.retry_after_s if isinstance(error, JudgeCallError) else None
            return asked_for if asked_for is not None else backoff(state)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(config.retries + 1),
            wait=wait,
            retry=retry_if_exception(worth_retrying),
            reraise=True,
        )
        return await retrying(self._try)

    async def _try(self) -> JudgeReply:
        config = self.config
        try:
            # The client's own timeout is for each read: a server that drips bytes would never reach
            # it.
            async with asyncio.timeout(config.timeout_s):
                return await self._ask()
        except TimeoutError as error:
            raise JudgeCallError(
                f"no reply within {config.timeout_s:g} s", retryable=True
            ) from error
        except (APIConnectionError, httpx.TransportError) as error:
            raise JudgeCallError(f"connection failed: {_reason(error)}", retryable=True) from error
        except APIStatusError as error:
            raise _status_error(error) from error
        except OpenAIError as error:
            raise JudgeCallError(f"call failed: {_reason(error)}", retryable=False) from error
        finally:
            self.on_start()

    async def _ask(self) -> JudgeReply:
        config = self.config
        key = self.routing_key
        create: Any = self.client.chat.completions.with_raw_response.create
        raw = await create(
            model=config.model,
            messages=list(self.messages),
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=config.extra_body or None,
            extra_headers=None if key is None else {ROUTING_HEADER: key},
        )
        response = raw.http_response
        try:
            if not response.headers.get("content-type", "").startswith(_EVENT_STREAM):
                return _whole(await response.aread())
            return await self._streamed(response)
        finally:
            await response.aclose()

    async def _streamed(self, response: httpx.Response) -> JudgeReply:
        text: list[str] = []
        usage = None
        is_finished = is_cut = False
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data in (line, _DONE):  # an empty line, a comment, the end
                continue
            chunk = _chunk(data)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                # A server may open the stream with the role before it has read the prompt.
                if any(value for name, value in choice.delta.items() if name != "role"):
                    self.on_start()
                content = choice.delta.get("content")
                text += [content] if isinstance(content, str) else []
                is_finished |= choice.finish_reason is not None
                is_cut |= choice.finish_reason == "length"
        if not is_finished:
            raise JudgeCallError("connection failed: the reply broke off", retryable=True)
        return JudgeReply(text="".join(text), usage=usage, is_cut=is_cut)


def _whole(content: bytes) -> JudgeReply:
    try:
        reply = _Whole.model_validate_json(content)
    except ValidationError as error:
        raise JudgeCallError(f"unreadable reply: {content[:200]!r}", retryable=False) from error
    [choice, *_] = reply.choices
    return JudgeReply(
        text=choice.message.content or "",
        usage=reply.usage,
        is_cut=choice.finish_reason == "length",
    )


def _chunk(data: str) -> _Chunk:
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise JudgeCallError(f"unreadable reply: {data[:200]!r}", retryable=False) from error
    if chunk.error is not None:
        raise _event_error(chunk.error)
    return chunk


def _status_error(error: APIStatusError) -> JudgeCallError:
    status = error.status_code
    too_long = (
        status == 413
        or error.code == "context_length_exceeded"
        or (status in (400, 422) and _TOO_LONG.search(error.message) is not None)
    )
    return JudgeCallError(
        f"status {status}: {_reason(error)}",
        retryable=status == 429 or status >= 500,
        too_long=too_long,
        retry_after_s=retry_after_s(error.response.headers.get("retry-after"), time.time()),
    )


def _event_error(error: _EventError) -> JudgeCallError:
    """An error that came as an event of the stream: its code is its status, if it has one."""
    code = str(error.code)
    status = int(code) if code.isdigit() else None
    return JudgeCallError(
        f"the reply broke off: {' '.join(error.message.split())[:300]}",
        retryable=status is None or status == 429 or status >= 500,
        too_long=code == "context_length_exceeded"
        or (status in (400, 413, 422) and _TOO_LONG.search(error.message) is not None),
    )


def retry_after_s(header: str | None, now: float) -> float | None:
    """Seconds of a Retry-After header (a number or an HTTP date, `now` in unix seconds); None if
    there is none.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _reason(error: BaseException) -> str:
    """The error's text, with its cause's if the client hides that behind "Connection error."."""
    text = " ".join(str(error).split())[:300]
    cause = error.__cause__
    return f"{text} ({type(cause).__name__}: {str(cause)[:200]})" if cause else text
