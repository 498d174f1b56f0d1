"""The scripted agent: talks to an OpenAI-compatible endpoint with the official client, and runs the
tools it is asked to run.

It knows only the wire format: messages, tools, streamed chunks, session headers. What the user says
and what tools return comes from an `Episode`. Whatever the model answers, a session ends with a
`SessionReport`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from examples.tool_lab.domain import TOOLS
from examples.tool_lab.episode import Episode
from examples.tool_lab.preferences import PREFERENCES, TRAINED_KINDS, lab_users

# Weather before hotels: the correction of the weather answer then comes with the next request.
SESSION_PLANS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("weather", "hotels"), 8),
    (("hotels", "weather"), 2),
    (("hotels",), 2),
    (("weather",), 2),
    (("money", "weather", "hotels"), 1),
    (("weather", "hotels", "book"), 1),
    (("hotels", "money", "weather", "hotels"), 1),
)
OPEN_STATE_PROBABILITY = 0.9
"""Share of requests in which an open user says what they want, after one of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How the scripted agent behaves. Shares are probabilities per session, drawn from its seed."""

    model: str = "policy"
    temperature: float = 1.0
    max_tokens: int = 64
    stream_share: float = 0.5
    header_share: float = 0.5
    farewell_probability: float = 0.15
    leave_probability: float = 0.6
    max_turns: int = 24
    preferences: Mapping[str, str] = field(default_factory=lambda: lab_users(TRAINED_KINDS))
    open_users: float = 0.0
    """Share of users without hidden preferences, who ask openly for the default and mind that."""
    pause_s: float = 0.0
    """Seconds between an answer and the next request: what thinking and tools take."""
    extra_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """How a session went: the reactions to its turns, in order, and why it ended.

    `ended` is over (the user left, or it was time to close), max_turns, or failed (the endpoint
    refused or stopped halfway; `error` says how).
    """

    seed: int
    turns: int
    reactions: tuple[str, ...]
    ended: str
    error: str | None = None


def lab_episode(seed: int, config: AgentConfig, *, held_out: bool = False) -> Episode:
    """The episode of session `seed`: a lab user with a plan of requests."""
    rng = random.Random(f"plan-{seed}")
    plans = [plan for plan, _ in SESSION_PLANS]
    weights = [weight for _, weight in SESSION_PLANS]
    kinds = rng.choices(plans, weights)[0]
    if "title" in config.preferences:
        # Users who care how they are addressed say hello.
        kinds = ("greet", *kinds)
    is_open = config.open_users > 0 and rng.random() < config.open_users
    return Episode(
        seed=rng.randrange(2**40),
        preferences={} if is_open else config.preferences,
        state_probability=OPEN_STATE_PROBABILITY if is_open else 0.0,
        open_wishes={kind: PREFERENCES[kind].default for kind in config.preferences},
        request_kinds=kinds,
        held_out=held_out,
        farewell_probability=config.farewell_probability,
        leave_probability=config.leave_probability,
    )


async def run_session(
    client: openai.AsyncOpenAI,
    seed: int,
    config: AgentConfig,
    *,
    held_out: bool = False,
    closing: asyncio.Event | None = None,
) -> SessionReport:
    """Play one conversation to its end, or to the reply after which it is `closing` time. Never
    raises because of the endpoint's answers; cancelling it is safe.
    """
    rng = random.Random(f"agent-{seed}")
    episode = lab_episode(seed, config, held_out=held_out)
    is_streaming = rng.random() < config.stream_share
    headers = dict(config.extra_headers)
    if rng.random() < config.header_share:
        headers["X-Session-Id"] = str(uuid.UUID(int=rng.getrandbits(128)))
    reactions: list[str] = []
    while len(reactions) < config.max_turns:
        if episode.is_last_request and "X-Session-Id" in headers:
            headers["X-Session-Done"] = "true"
        try:
            response = await complete(client, episode.messages, config, headers, is_streaming)
        except openai.APIError as error:
            return SessionReport(
                seed=seed,
                turns=len(reactions),
                reactions=tuple(reactions),
                ended="failed",
                error=f"{type(error).__name__}: {error}",
            )
        following = episode.observe(response)
        reactions.append(episode.last_reaction.kind)
        if not following or (closing is not None and closing.is_set()):
            return SessionReport(
                seed=seed, turns=len(reactions), reactions=tuple(reactions), ended="over"
            )
        await asyncio.sleep(config.pause_s)
    return SessionReport(
        seed=seed, turns=len(reactions), reactions=tuple(reactions), ended="max_turns"
    )


async def complete(
    client: openai.AsyncOpenAI,
    messages: Sequence[Mapping[str, Any]],
    config: AgentConfig,
    headers: Mapping[str, str],
    is_streaming: bool,
) -> dict[str, Any]:
    """One chat completion as an assistant message. Raises openai.APIError."""
    request: dict[str, Any] = {
        "model": config.model,
        "messages": list(messages),
        "tools": TOOLS,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "extra_headers": dict(headers),
    }
    if is_streaming:
        return await _streamed(client, request)
    completion = await client.chat.completions.create(**request)
    message = completion.choices[0].message
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    return assistant_message(
        message.content,
        [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in calls
        ],
    )


async def _streamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> dict[str, Any]:
    content: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    stream = await client.chat.completions.create(**request, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            content.append(choice.delta.content or "")
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.id or call["id"]
                if part.function is not None:
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
    return assistant_message("".join(content), [calls[index] for index in sorted(calls)])


def assistant_message(content: str | None, calls: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """An assistant message in the shape in which the next request sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return message
