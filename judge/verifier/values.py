"""What each turn of a session was worth before it was answered: the policy answers its prompt a few
times more, and the verifier judges each of these answers as the session's last (ALGORITHMS 8.5).

It neither samples nor stores: `Continues` answers, and the worker stores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from records.messages import Message
from records.outcomes.values import TurnValue
from records.types import TurnRecord
from rollout_bridge.together import all_or_none


class Continues(Protocol):
    """The policy, as it is served now."""

    async def answer_again(self, turn: TurnRecord) -> Message | None:
        """Another answer to a turn's prompt; None if it was cut off, or the prompt is refused.
        Raises ServiceUnavailable.
        """
        ...


async def turn_value(
    turn: TurnRecord,
    tries: int,
    policy: Continues,
    ask: Callable[[list[Message]], Awaitable[float | None]],
) -> TurnValue:
    """The mean outcome of `tries` further answers; those without an outcome (`ask` gives None) do
    not count. Raises ServiceUnavailable.
    """

    async def one() -> float | None:
        answer = await policy.answer_again(turn)
        return None if answer is None else await ask([*turn.messages, answer])

    outcomes = await all_or_none([one() for _ in range(tries)])
    found = [outcome for outcome in outcomes if outcome is not None]
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
