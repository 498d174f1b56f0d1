"""Wrong tool calls, made on purpose, and the hint that would have prevented each.

They are in the corpus as turns with no weight. What is learned is how the agent recovers from the
tool's error, and what the judge says about it.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from typing import Any

from examples.tool_lab.domain import assistant_call
from examples.tool_lab.episode import Episode
from examples.tool_lab.phrases import COMPLAINT_HINTS
from examples.tool_lab.script import TOOL_OF

_INVENTED_ANSWERS = {
    "weather": "In Fahrenheit: {n} in {city}, sun.",
    "hotels": "First in {city}: Hotel, {n} a night.",
    "book": "Booked {hotel} for {nights} nights.",
    "money": "{amount} {source} is {n} {target}.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """What was made wrong: `key` is the argument whose right value is `value`, or None if the right
    tool `value` was not called.
    """

    key: str | None
    value: Any


def corrupted_reply(
    response: dict[str, Any], episode: Episode, rng: random.Random
) -> tuple[dict[str, Any], Corruption]:
    """A wrong version of a right tool call, and what is wrong with it."""
    call = response["tool_calls"][0]
    arguments = json.loads(call["function"]["arguments"])
    name = call["function"]["name"]
    draw = rng.random()
    if draw < 0.12:
        text = _INVENTED_ANSWERS[episode.request.kind].format(
            n=rng.randint(1, 99), **episode.request.slots
        )
        return {"role": "assistant", "content": text}, Corruption(key=None, value=name)
    if draw < 0.22:
        wrong_name = name.split("_")[rng.randrange(2)]
        return assistant_call(wrong_name, arguments, call["id"]), Corruption(key=None, value=name)
    key = rng.choice(_entity_keys(arguments) if draw < 0.75 else sorted(arguments))
    right = arguments[key]
    if draw < 0.75:
        arguments[key] = misspelt(str(right), rng)
    elif draw < 0.9:
        del arguments[key]
    elif isinstance(right, int):
        arguments[key] = str(right)
    else:
        arguments[key] = rng.randint(1, 9)
    return assistant_call(name, arguments, call["id"]), Corruption(key=key, value=right)


def _entity_keys(arguments: dict[str, Any]) -> list[str]:
    return [key for key in ("city", "hotel", "source", "target") if key in arguments]


def misspelt(name: str, rng: random.Random) -> str:
    """`name` with one letter dropped, changed or doubled."""
    position = rng.randrange(1, len(name))
    draw = rng.random()
    if draw < 0.4:
        return name[:position] + name[position + 1 :]
    if draw < 0.7:
        return name[:position] + name[position] + name[position:]
    alphabet = string.ascii_uppercase if name.isupper() else string.ascii_lowercase
    letter = rng.choice([letter for letter in alphabet if letter != name[position]])
    return name[:position] + letter + name[position + 1 :]


def complaint_hint(episode: Episode, rng: random.Random) -> str:
    """The hint for an assistant that did not call the right tool."""
    return rng.choice(COMPLAINT_HINTS[episode.request.kind]).format(**episode.request.slots)


assert set(_INVENTED_ANSWERS) == set(TOOL_OF)
