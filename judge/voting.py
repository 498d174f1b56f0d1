"""m votes on one turn, asked at the same time of any OpenAI-compatible server.

Retries here bridge a hiccup: transport errors, 429 and 5xx, a few times. A judge that stays away is
the worker loop's affair. A vote whose text holds no decision abstains; a vote whose call failed
says why. Knows no store.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

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
from judge.parsing import parse_answer
from records.types import Vote

# How servers (OpenAI, SGLang, vLLM, llama.cpp, ours) say that a prompt does not fit.
_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum context|too long|longer than|too many tokens",
    re.I,
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


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Reply(BaseModel):
    """What a vote needs of a chat completion. The client itself lets any JSON pass as one."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The votes on one turn, in the order of their index, failed ones included."""

    votes: tuple[Vote, ...]
    retry_after_s: float | None
    refused_as_too_long: bool

    @property
    def all_failed(self) -> bool:
        """Whether no vote got a reply: this is no verdict."""
        return all(vote.error is not None for vote in self.votes)

    @property
    def too_long(self) -> bool:
        """Whether no vote got a reply because the prompt exceeds the judge's context."""
        return self.all_failed and self.refused_as_too_long


async def cast_votes(
    client: AsyncOpenAI, messages: Sequence[dict[str, str]], config: JudgeConfig
) -> Ballot:
    """Ask for `config.votes` votes at once. A failed call is a vote with an `error`; nothing is
    raised for it.
    """
    outcomes = await asyncio.gather(
        *(_cast_vote(client, messages, config, index) for index in range(config.votes))
    )
    errors = [error for _, error in outcomes if error is not None]
    waits = [error.retry_after_s for error in errors if error.retry_after_s is not None]
    return Ballot(
        votes=tuple(vote for vote, _ in outcomes),
        retry_after_s=max(waits, default=None),
        refused_as_too_long=any(error.too_long for error in errors),
    )


async def _cast_vote(
    client: AsyncOpenAI, messages: Sequence[dict[str, str]], config: JudgeConfig, index: int
) -> tuple[Vote, JudgeCallError | None]:
    started = time.monotonic()
    try:
        reply = await _call_with_retries(client, messages, config)
    except JudgeCallError as error:
        vote = Vote(
            index=index,
            score=None,
            hint="",
            text="",
            latency_s=time.monotonic() - started,
            prompt_tokens=None,
            completion_tokens=None,
            error=str(error),
        )
        return vote, error
    text = reply.choices[0].message.content or ""
    score, hint = parse_answer(text)
    vote = Vote(
        index=index,
        score=score,
        hint=hint,
        text=text,
        latency_s=time.monotonic() - started,
        prompt_tokens=reply.usage.prompt_tokens if reply.usage else None,
        completion_tokens=reply.usage.completion_tokens if reply.usage else None,
    )
    return vote, None


async def _call_with_retries(
    client: AsyncOpenAI, messages: Sequence[dict[str, str]], config: JudgeConfig
) -> _Reply:
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
    return await retrying(_call, client, messages, config)


async def _call(
    client: AsyncOpenAI, messages: Sequence[dict[str, str]], config: JudgeConfig
) -> _Reply:
    try:
        # The client's own timeout is one for each read: a server that drips bytes would never end
        # it.
        async with asyncio.timeout(config.timeout_s):
            raw = await client.chat.completions.with_raw_response.create(
                model=config.model,
                messages=list(messages),  # pyright: ignore[reportArgumentType]
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=config.max_tokens,
                extra_body=config.extra_body or None,
            )
    except TimeoutError as error:
        raise JudgeCallError(f"no reply within {config.timeout_s:g} s", retryable=True) from error
    except APIConnectionError as error:
        raise JudgeCallError(f"connection failed: {_reason(error)}", retryable=True) from error
    except APIStatusError as error:
        raise _status_error(error) from error
    except OpenAIError as error:
        raise JudgeCallError(f"call failed: {_reason(error)}", retryable=False) from error
    try:
        return _Reply.model_validate_json(raw.content)
    except ValidationError as error:
        raise JudgeCallError(f"unreadable reply: {raw.content[:200]!r}", retryable=False) from error


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
    """The error's text, with that of its cause where the client hides it behind "Connection
    error.".
    """
    text = " ".join(str(error).split())[:300]
    cause = error.__cause__
    return f"{text} ({type(cause).__name__}: {str(cause)[:200]})" if cause else text
