"""m votes on one turn, asked of any OpenAI-compatible server.

The first vote leads: the others are asked once it has its first token. By then the prompt, which is
the same for all of them, is in the server's prefix cache, and the votes share one prefill. If a
majority decides, votes that can change nothing are not asked for. A judge that is unavailable is
left to the worker loop. A vote whose text contains no decision abstains; a vote whose call failed
has the `error`. Independent of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from openai import AsyncOpenAI

from judge.config import JudgeConfig
from judge.votes.calls import JudgeCall, JudgeCallError, JudgeReply
from judge.votes.parsing import parse_answer
from records.types import Vote

IsDecided: TypeAlias = Callable[[Sequence[Vote]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """The votes on one turn, in the order of their index, failed ones included.

    `cached_tokens` of all votes' prompt tokens were in the judge's cache; 0 if it does not report
    that.
    """

    votes: tuple[Vote, ...]
    retry_after_s: float | None
    refused_as_too_long: bool
    cached_tokens: int = 0

    @property
    def all_failed(self) -> bool:
        """Whether no vote got a reply: there is no verdict then."""
        return all(vote.error is not None for vote in self.votes)

    @property
    def too_long(self) -> bool:
        """Whether no vote got a reply because the prompt exceeds the judge's context."""
        return self.all_failed and self.refused_as_too_long


async def cast_votes(
    client: AsyncOpenAI,
    messages: Sequence[dict[str, str]],
    config: JudgeConfig,
    *,
    routing_key: str | None = None,
    is_decided: IsDecided | None = None,
) -> Ballot:
    """Ask for `config.votes` votes. A failed call gives a vote with an `error` and raises nothing.
    With SGLang's router, `routing_key` keeps the votes on one server.

    With `is_decided`, a majority of the votes is asked for first, and the others only if it finds
    that these do not decide the question.
    """
    led = asyncio.Event()
    call = JudgeCall(
        client=client,
        messages=messages,
        config=config,
        routing_key=routing_key,
        on_start=led.set,
    )

    async def follow(index: int) -> _Outcome:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(led.wait(), config.shared_prefill_wait_s)
        return await _cast_vote(call, index)

    most = config.votes
    first = most if is_decided is None else most // 2 + 1
    outcomes = await asyncio.gather(
        _cast_vote(call, 0), *(follow(index) for index in range(1, first))
    )
    if is_decided is not None and not is_decided([outcome.vote for outcome in outcomes]):
        outcomes += await asyncio.gather(*(_cast_vote(call, index) for index in range(first, most)))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    waits = [error.retry_after_s for error in errors if error.retry_after_s is not None]
    return Ballot(
        votes=tuple(outcome.vote for outcome in outcomes),
        retry_after_s=max(waits, default=None),
        refused_as_too_long=any(error.too_long for error in errors),
        cached_tokens=sum(outcome.cached_tokens for outcome in outcomes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    vote: Vote
    error: JudgeCallError | None = None
    cached_tokens: int = 0


async def _cast_vote(call: JudgeCall, index: int) -> _Outcome:
    started = time.monotonic()
    try:
        reply = await call.reply()
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
        return _Outcome(vote=vote, error=error)
    return _read(reply, index, time.monotonic() - started)


def _read(reply: JudgeReply, index: int, latency_s: float) -> _Outcome:
    score, hint = parse_answer(reply.text)
    vote = Vote(
        index=index,
        score=score,
        hint=hint,
        text=reply.text,
        latency_s=latency_s,
        prompt_tokens=reply.usage.prompt_tokens if reply.usage else None,
        completion_tokens=reply.usage.completion_tokens if reply.usage else None,
    )
    return _Outcome(vote=vote, cached_tokens=(reply.usage and reply.usage.cached_tokens) or 0)
