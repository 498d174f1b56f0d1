"""The world of the tool lab: four tools, their schemas, and what they return.

Everything is pure and seeded: a `World` knows the names of one conversation, and every result is a
function of the world's seed and the arguments. The world knows no users, no preferences and no
models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.tool_lab.names import random_code, random_name

SYSTEM_PROMPT = "You are a travel assistant."
SKIES = ("rain", "sun", "snow", "fog", "wind", "clouds")
SORTS = ("rating", "price")
ROOMS = ("single", "double")


def _tool(name: str, description: str, properties: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties},
        },
    }


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}

TOOLS: list[dict[str, Any]] = [
    _tool("get_weather", "Weather of a city.", {"city": _STRING}),
    _tool("find_hotels", "Sort is rating or price.", {"city": _STRING, "sort": _STRING}),
    _tool(
        "book_hotel",
        "Room is single or double.",
        {"hotel": _STRING, "nights": _INTEGER, "room": _STRING},
    ),
    _tool(
        "convert_money",
        "Convert money.",
        {"amount": _INTEGER, "source": _STRING, "target": _STRING},
    ),
]
ENUMS: dict[str, tuple[str, ...]] = {"sort": SORTS, "room": ROOMS}
SCHEMAS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in TOOLS
}


@dataclass(slots=True, kw_only=True)
class World:
    """The names that exist in a conversation; the sets grow as users mention them."""

    seed: int
    held_out: bool
    cities: set[str] = field(default_factory=set)
    hotels: set[str] = field(default_factory=set)
    currencies: set[str] = field(default_factory=set)

    def rng_for(self, *key: object) -> random.Random:
        """A generator that depends on this world's seed and `key` only."""
        return random.Random(json.dumps([self.seed, *key]))


def execute(world: World, name: str, arguments: Any) -> dict[str, Any]:
    """The tool's result, or `{"error": text}` for a call that cannot be carried out. Never raises
    on bad calls.
    """
    problem = call_problem(name, arguments)
    if problem is not None:
        return {"error": problem}
    return _HANDLERS[name](world, arguments)


def call_problem(name: str, arguments: Any) -> str | None:
    """What is wrong with the form of a call (unknown tool; missing, unknown or mistyped argument),
    or None.
    """
    schema = SCHEMAS.get(name)
    if schema is None:
        return f"no tool {name}"
    if not isinstance(arguments, Mapping):
        return "arguments must be an object"
    for key, value_schema in schema.items():
        if key not in arguments:
            return f"missing argument {key}"
        value = arguments[key]
        is_right = (
            isinstance(value, int) and not isinstance(value, bool)
            if value_schema["type"] == "integer"
            else isinstance(value, str)
        )
        if not is_right or value not in ENUMS.get(key, (value,)):
            return f"bad {key}"
    unknown = [key for key in arguments if key not in schema]
    return f"unknown argument {unknown[0]}" if unknown else None


def _get_weather(world: World, arguments: Mapping[str, Any]) -> dict[str, Any]:
    city = arguments["city"]
    if city not in world.cities:
        return {"error": f"unknown city {city}"}
    rng = world.rng_for("weather", city)
    celsius = rng.randint(1, 39)
    return {"temp_c": celsius, "temp_f": round(celsius * 9 / 5 + 32), "sky": rng.choice(SKIES)}


def _find_hotels(world: World, arguments: Mapping[str, Any]) -> dict[str, Any]:
    city = arguments["city"]
    if city not in world.cities:
        return {"error": f"unknown city {city}"}
    rng = world.rng_for("hotels", city)
    first, second = (random_name(rng, held_out=world.held_out) for _ in range(2))
    cheap, dear = sorted(rng.sample(range(40, 300), 2))
    # The cheaper hotel has the lower rating, so that the two orders differ.
    hotels = [
        {"name": first, "price": cheap, "rating": rng.randint(1, 4)},
        {"name": second, "price": dear, "rating": 5},
    ]
    world.hotels.update((first, second))
    return {"hotels": hotels if arguments["sort"] == "price" else hotels[::-1]}


def _book_hotel(world: World, arguments: Mapping[str, Any]) -> dict[str, Any]:
    hotel = arguments["hotel"]
    if hotel not in world.hotels:
        return {"error": f"unknown hotel {hotel}"}
    if not 1 <= arguments["nights"] <= 30:
        return {"error": "bad nights"}
    return {"code": random_code(world.rng_for("book", hotel))}


def _convert_money(world: World, arguments: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("source", "target"):
        if arguments[key] not in world.currencies:
            return {"error": f"unknown currency {arguments[key]}"}
    rng = world.rng_for("rate", arguments["source"], arguments["target"])
    cents = round(arguments["amount"] * rng.randint(20, 400))
    return {"value": f"{cents // 100}.{cents % 100:02d}"}


_HANDLERS = {
    "get_weather": _get_weather,
    "find_hotels": _find_hotels,
    "book_hotel": _book_hotel,
    "convert_money": _convert_money,
}


def result_text(result: Mapping[str, Any]) -> str:
    """A tool result as the content of a tool message."""
    return json.dumps(result, ensure_ascii=False)


def assistant_call(name: str, arguments: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """An assistant message that makes one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    """A tool message that answers the call `call_id`."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}
