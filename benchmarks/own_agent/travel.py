"""The tools, executed: which cities, hotels and currencies exist for one person, and what a tool
call returns.

Seeded and pure. Names and schemas are those that the model was made for; the results are made here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.tool_lab.domain import TOOLS
from examples.tool_lab.names import random_code, random_currency, random_name

SKIES = ("sun", "rain", "clouds", "wind", "fog", "snow")
CHOICES = {"sort": ("rating", "price"), "room": ("single", "double")}
PARAMETERS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in TOOLS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as it was sampled. `arguments` is None if they are not a JSON object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | None


@dataclass(slots=True, kw_only=True)
class Travel:
    """What exists for one person: names are added as they are mentioned.

    `held_out` names occur in no text that the model or a run has learned from.
    """

    rng: random.Random
    held_out: bool
    known: set[str] = field(default_factory=set)

    def name(self) -> str:
        """A new city or hotel."""
        return self._known(random_name(self.rng, held_out=self.held_out))

    def currency(self) -> str:
        """A new currency."""
        return self._known(random_currency(self.rng, held_out=self.held_out))

    def _known(self, name: str) -> str:
        self.known.add(name)
        return name

    def perform(self, call: Call) -> dict[str, Any]:
        """What the tool returns; {"error": why} for a call that it cannot carry out."""
        problem = call_problem(call)
        if problem is not None:
            return {"error": problem}
        assert call.arguments is not None
        for key in ("city", "hotel", "source", "target"):
            name = call.arguments.get(key)
            if name is not None and name not in self.known:
                what = "currency" if key in ("source", "target") else key
                return {"error": f"unknown {what} {name}"}
        return self._result(call.name, call.arguments)

    def _result(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if name == "get_weather":
            celsius = self.rng.randint(1, 39)
            fahrenheit = round(celsius * 1.8 + 32)
            return {"temp_c": celsius, "temp_f": fahrenheit, "sky": self.rng.choice(SKIES)}
        if name == "find_hotels":
            low, high = sorted(self.rng.sample(range(40, 300), 2))
            cheap = {"name": self.name(), "price": low, "rating": self.rng.randint(1, 4)}
            dear = {"name": self.name(), "price": high, "rating": 5}
            return {"hotels": [cheap, dear] if arguments["sort"] == "price" else [dear, cheap]}
        if name == "book_hotel":
            return {"code": random_code(self.rng)}
        cents = arguments["amount"] * self.rng.randint(20, 400)
        return {"value": f"{cents // 100}.{cents % 100:02d}"}


def call_problem(call: Call) -> str | None:
    """What is wrong with a call's form (no such tool; missing, unknown or mistyped arguments), or
    None.
    """
    wanted = PARAMETERS.get(call.name)
    if wanted is None:
        return f"no tool {call.name}"
    if call.arguments is None:
        return "arguments must be an object"
    for key, schema in wanted.items():
        if key not in call.arguments:
            return f"missing argument {key}"
        value = call.arguments[key]
        kind = int if schema["type"] == "integer" else str
        if type(value) is not kind or value not in CHOICES.get(key, (value,)):
            return f"bad {key}"
    extra = sorted(call.arguments.keys() - wanted.keys())
    return f"unknown argument {extra[0]}" if extra else None


def calls_of(reply: Mapping[str, Any]) -> list[Call]:
    """The tool calls of an assistant message."""
    return [
        Call(
            call_id=one["id"],
            name=one["function"]["name"],
            arguments=_object(one["function"]["arguments"]),
        )
        for one in reply.get("tool_calls") or ()
    ]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
