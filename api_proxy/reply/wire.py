"""Replies in OpenAI's JSON: whole completions and the chunks of a stream.

Pure functions of the given ids, texts and times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api_proxy.errors import ApiError
from api_proxy.reply.reply import Delta, Reply

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def summed(usages: Sequence[Usage]) -> Usage:
    """The usage of several replies to one prompt, which counts once."""
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=usages[0].cached_tokens,
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every object of one reply repeats."""

    turn_id: str
    model: str
    created: int

    def body(self, kind: str) -> dict[str, Any]:
        """The fields that open an object of this kind."""
        return {
            "id": f"chatcmpl-{self.turn_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def finish_reason(sampled: str, reply: Reply) -> str:
    """OpenAI's reason: a reply that ended by itself with whole calls ends with "tool_calls"."""
    return "tool_calls" if sampled == "stop" and reply.calls_tools else sampled


def choice_body(
    index: int, reply: Reply, reason: str, logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """One choice of a `chat.completion`."""
    return {
        "index": index,
        "message": {**reply.message(), "refusal": None},
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": reason,
    }


def completion_body(
    head: ReplyHead, choices: Sequence[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    """A whole `chat.completion`."""
    return {**head.body("chat.completion"), "choices": choices, "usage": usage.body()}


class ChunkWriter:
    """The chunks of one streamed reply, as server-sent events."""

    def __init__(self, head: ReplyHead, include_usage: bool, choice: int = 0) -> None:
        self._base = head.body("chat.completion.chunk")
        self._choice = choice
        self._include_usage = include_usage

    def role(self) -> bytes:
        """The first chunk."""
        return self._event({"role": "assistant", "content": ""})

    def delta(self, delta: Delta, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        """One chunk of content, reasoning or a tool call."""
        return self._event(_delta_body(delta), logprobs)

    def finish(self, reason: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        """The last chunk with a choice; `logprobs` of tokens that no earlier chunk listed."""
        return self._event({}, logprobs, reason)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk; nothing unless it was asked for."""
        if not self._include_usage:
            return b""
        return _sse({**self._base, "choices": [], "usage": usage.body()})

    def _event(
        self,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": self._choice,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        body = {**self._base, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _sse(body)


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun; no `[DONE]` follows it."""
    return _sse(error.body())


def logprob_entries(
    decode: Callable[[Sequence[int]], str],
    bytes_of: Callable[[int], bytes | None],
    ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> list[dict[str, Any]]:
    """One entry for each sampled token, stop token and calls included, at the sampling temperature.

    `bytes_of` gives a token's own bytes, even if they are only part of a character. `top` lists
    (id, log-prob) pairs for each token.
    """
    alternatives = top if top is not None else [()] * len(ids)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(token)
        listed = None if raw is None else list(raw)
        return {"token": decode([token]), "logprob": logprob, "bytes": listed}

    return [
        {
            **entry(token, logprob),
            "top_logprobs": [entry(other, value) for other, value in pairs],
        }
        for token, logprob, pairs in zip(ids, logprobs, alternatives, strict=True)
    ]


def _delta_body(delta: Delta) -> dict[str, Any]:
    if delta.call is None:
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        return {"content": delta.content}
    piece: dict[str, Any] = {"index": delta.call.index}
    function: dict[str, Any] = {"arguments": delta.call.arguments}
    if delta.call.id is not None:
        piece |= {"id": delta.call.id, "type": "function"}
        function = {"name": delta.call.name, **function}
    return {"tool_calls": [{**piece, "function": function}]}


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
