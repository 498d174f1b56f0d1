"""What each turn of a session was worth before it was answered: the policy answers its prompt a few
times more, and the verifier judges each of these answers as the session's last (ALGORITHMS 8.5).

It neither samples nor stores: `Continues` answers, and the worker stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from judge.verifier.calls import InvalidOutcome, Said
from records.messages import Message
from records.outcomes.values import TurnValue
from records.types import TurnRecord


class Continues(Protocol):
    """The policy, as it is served now."""

    async def answer_again(self, turn: TurnRecord) -> Message:
        """Another answer to a turn's prompt. Raises ServiceUnavailable."""
        ...


async def turn_value(
    turn: TurnRecord,
    tries: int,
    policy: Continues,
    ask: Callable[[list[Message]], Awaitable[Said]],
) -> TurnValue:
    """The mean outcome of `tries` further answers; answers of which the verifier gives no outcome
    do not count. Raises ServiceUnavailable.
    """

    async def one() -> float | None:
        answer = await policy.answer_again(turn)
        try:
            return (await ask([*turn.messages, answer])).outcome
        except InvalidOutcome:
            return None

    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(one()) for _ in range(tries)]
    except ExceptionGroup as failed:  # the first ended the others
        raise failed.exceptions[0] from failed
    found = [outcome for outcome in (task.result() for task in asked) if outcome is not None]
    mean = sum(found) / len(found) if found else None
    return TurnValue(turn_id=turn.turn_id, value=mean, tries=len(found))


def as_session(
    session_id: str, name: str | None, messages: list[Message], tools: Any
) -> dict[str, Any]:
    """What a verifier gets of a session that ends with the last of `messages`."""
    return {
        "session_id": session_id,
        "name": name,
        "messages": messages,
        "tools": list(tools),
    }
