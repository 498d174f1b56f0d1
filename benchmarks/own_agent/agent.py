"""The agent: the official OpenAI client, a system prompt, four tools and a loop. It sends no header
of this project; the endpoint must find out itself which requests belong together.

It shows the user each call with its result, as agents do on a screen: words about a call come with
the tool's result, words about an answer after it. An agent that asks before it calls sends them in
place of the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.own_agent.people import Person
from benchmarks.own_agent.travel import Travel, calls_of
from examples.tool_lab.domain import SYSTEM_PROMPT, TOOLS

Message = dict[str, Any]
MAX_TURNS = 16
MAX_TOKENS = 64
TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the policy answers. `headers` are sent with every request. `memory`: what the agent was
    told and keeps in its system prompt.
    """

    client: openai.AsyncOpenAI
    headers: Mapping[str, str] | None = None
    memory: Sequence[str] = ()

    async def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant message that follows. Raises openai.APIError."""
        completion = await self.client.chat.completions.create(
            model="policy",
            messages=remembering(messages, self.memory),  # pyright: ignore[reportArgumentType]
            tools=TOOLS,  # pyright: ignore[reportArgumentType]
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            extra_headers=dict(self.headers or {}),
        )
        message = completion.choices[0].message.model_dump(exclude_none=True)
        wanted = {key: message[key] for key in ("role", "tool_calls") if message.get(key)}
        return {**wanted, "content": message.get("content") or ""}


def remembering(messages: Sequence[Message], memory: Sequence[str]) -> Sequence[Message]:
    """The messages, with the agent's memory at the end of the system prompt."""
    if not memory:
        return messages
    system, *others = messages
    return [{**system, "content": " ".join([system["content"], *memory])}, *others]


def opening(words: str) -> list[Message]:
    """The messages of a conversation that begins with these words of the user."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": words}]


def tool_results(reply: Message, travel: Travel) -> list[tuple[Any, dict[str, Any], Message]]:
    """Each call of a reply with its result, and the tool message that reports it."""
    found = []
    for call in calls_of(reply):
        result = travel.perform(call)
        content = json.dumps(result)
        found.append(
            (call, result, {"role": "tool", "tool_call_id": call.call_id, "content": content})
        )
    return found


def what_follows(reply: Message, person: Person, *, asks_first: bool) -> list[Message]:
    """The messages after a reply: results of its calls, and the user's words. Empty if the user has
    left. With `asks_first`, words about a call replace its result.
    """
    if not reply.get("tool_calls"):
        words = person.hear(str(reply["content"]))
        return [{"role": "user", "content": words}] if words else []
    following: list[Message] = []
    broke_in: list[Message] = []
    for call, result, message in tool_results(reply, person.travel):
        said = person.see(call, result)
        if said == "":
            return []
        if said is not None and asks_first:
            message = {**message, "content": json.dumps({"declined": said})}
        elif said is not None:
            broke_in.append({"role": "user", "content": said})
        following.append(message)
    return following + broke_in


async def run_session(endpoint: Endpoint, person: Person, *, asks_first: bool = False) -> int:
    """One conversation to its end; returns how many replies it took. Raises openai.APIError."""
    messages = opening(person.ask())
    for turn in range(1, MAX_TURNS + 1):
        reply = await endpoint.reply(messages)
        following = what_follows(reply, person, asks_first=asks_first)
        if not following:
            return turn
        messages += [reply, *following]
    return MAX_TURNS
