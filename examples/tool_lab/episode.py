"""One conversation between an assistant and a user, as a state machine over messages.

`observe(response)` takes the assistant's message and returns the messages that follow it: tool
results (or the user's objection in place of one), or the user's next words, or nothing when the
conversation is over. The scripted agent drives it over HTTP, the corpus builder with a scripted
assistant, the evaluation with neither.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.tool_lab.domain import SYSTEM_PROMPT, World, execute, result_text, tool_message
from examples.tool_lab.users import Request, User

MAX_FAILURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """What happened after a response, for whoever writes or checks a judge's answer.

    kind: success, unavailable, tool_error, declined, corrected, complaint, content, moved_on or
    over. `preference` and `wanted` name the violated preference of `declined` and `corrected`.
    """

    kind: str
    preference: str | None = None
    wanted: str | None = None


class Episode:
    """A conversation with its world, user and requests. `messages` grows with every observation."""

    def __init__(
        self,
        *,
        seed: int,
        preferences: Mapping[str, str],
        request_kinds: Sequence[str],
        held_out: bool,
        state_probability: float = 0.0,
        open_wishes: Mapping[str, str] | None = None,
        farewell_probability: float = 0.3,
        unavailable_probability: float = 0.0,
        leave_probability: float = 0.0,
    ) -> None:
        if not request_kinds:
            raise ValueError("an episode needs at least one request")
        self._rng = random.Random(seed)
        self.world = World(seed=seed, held_out=held_out)
        self.user = User(
            rng=random.Random(seed + 1),
            preferences=preferences,
            state_probability=state_probability,
            open_wishes=open_wishes or {},
        )
        self._pending = list(request_kinds)
        self._farewell_probability = farewell_probability
        self._unavailable_probability = unavailable_probability
        self._leave_probability = leave_probability
        self._said_farewell = False
        self._is_leaving = False
        self._failures = 0
        self.result: dict[str, Any] | None = None
        self.last_reaction = Reaction(kind="over")
        self.request: Request
        text = self._next_request()
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": text},
        ]

    def _next_request(self) -> str:
        kind = self._pending.pop(0)
        self.result = None
        self._failures = 0
        self.request, text = self.user.ask(kind, self.world)
        return text

    @property
    def is_last_request(self) -> bool:
        """Whether the conversation ends with the next response, whatever it is."""
        return self._said_farewell or self._is_leaving

    @property
    def num_pending(self) -> int:
        """Requests that the user has not yet made."""
        return len(self._pending)

    @property
    def said_farewell(self) -> bool:
        """Whether the user's last words were thanks that end the conversation."""
        return self._said_farewell

    def observe(self, response: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Append `response` and what follows it; return what follows (empty: the conversation is
        over).
        """
        self.messages.append(dict(response))
        if self._said_farewell or self._is_leaving:
            following = self._end()
        elif response.get("tool_calls"):
            following = [self._answer_call(call) for call in response["tool_calls"]]
            if self._failures > MAX_FAILURES:
                following = self._end()
        else:
            following = self._react(str(response.get("content") or ""))
        self.messages.extend(following)
        return following

    def _end(self) -> list[dict[str, Any]]:
        self.last_reaction = Reaction(kind="over")
        return []

    def _answer_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return self._failed_call(call["id"], {"error": "arguments are not JSON"})
        # Executed before the user is asked: a call that fails does not need the user's consent.
        result = execute(self.world, function["name"], arguments)
        if "error" in result:
            return self._failed_call(call["id"], result)
        objection = self.user.review_call(self.request, arguments)
        if objection is not None:
            self._failures += 1
            self._is_leaving = self._leaves()
            kind = {"hotels": "order", "book": "room"}[self.request.kind]
            self.last_reaction = Reaction(
                kind="declined", preference=kind, wanted=self.user.told[kind]
            )
            return tool_message(call["id"], result_text({"declined": objection}))
        if self._rng.random() < self._unavailable_probability:
            self._failures += 1
            self.last_reaction = Reaction(kind="unavailable")
            return tool_message(call["id"], result_text({"error": "service unavailable"}))
        self.result = {"tool": function["name"], "arguments": arguments, "value": result}
        self.last_reaction = Reaction(kind="success")
        return tool_message(call["id"], result_text(result))

    def _failed_call(self, call_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
        self._failures += 1
        self.last_reaction = Reaction(kind="tool_error")
        return tool_message(call_id, result_text(result))

    def _react(self, text: str) -> list[dict[str, Any]]:
        if self.result is None and self.request.kind != "greet":
            self._failures += 1
            if self._failures > MAX_FAILURES:
                return self._end()
            self.last_reaction = Reaction(kind="complaint")
            return self._say(self.user.complain(self.request))
        violation = self.user.review_answer(self.request, text)
        if violation is None:
            return self._go_on(self.user.praise(self.request, text))
        kind, wanted, words = violation
        self.last_reaction = Reaction(kind="corrected", preference=kind, wanted=wanted)
        if self._pending and self._rng.random() < 0.85:
            return self._say(f"{words} {self.user.lead_in()}{self._next_request()}")
        self._failures += 1
        if self._failures > MAX_FAILURES:
            return self._end()
        self._is_leaving = self._leaves()
        return self._say(words)

    def _go_on(self, praise: str) -> list[dict[str, Any]]:
        if self._pending:
            self.last_reaction = Reaction(kind="moved_on")
            start = f"{praise} " if self._rng.random() < 0.4 else self.user.lead_in()
            return self._say(f"{start}{self._next_request()}")
        if self._rng.random() < self._farewell_probability:
            self._said_farewell = True
            self.last_reaction = Reaction(kind="content")
            return self._say(praise)
        return self._end()

    def _leaves(self) -> bool:
        return self._leave_probability > 0 and self._rng.random() < self._leave_probability

    def _say(self, text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]
