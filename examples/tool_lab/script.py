"""The scripted assistant: a good answer for an episode's next turn, given values for the
preferences.

It reads the episode's state, never the model's output. Its conversations are the corpus; the
evaluation uses its turns as the history before the turn that is measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from examples.tool_lab.domain import assistant_call
from examples.tool_lab.episode import Episode
from examples.tool_lab.phrases import FAREWELL
from examples.tool_lab.preferences import PREFERENCES, preferences_of
from examples.tool_lab.users import Request

TOOL_OF = {
    "weather": "get_weather",
    "hotels": "find_hotels",
    "book": "book_hotel",
    "money": "convert_money",
}


def turn_site(episode: Episode) -> str:
    """Which turn comes next: `call`, `answer` or `farewell`."""
    if episode.said_farewell:
        return "farewell"
    needs_tool = episode.request.kind in TOOL_OF
    return "call" if needs_tool and episode.result is None else "answer"


def chosen_value(
    rng: random.Random, kind: str, told: Mapping[str, str], hinted: Mapping[str, str]
) -> str:
    """The hint's value, else what the user said, else mostly the default."""
    preference = PREFERENCES[kind]
    if kind in hinted:
        return hinted[kind]
    if kind in told:
        return told[kind]
    return preference.alternative if rng.random() < preference.unasked_share else preference.default


def scripted_reply(
    episode: Episode, rng: random.Random, hinted: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The assistant message of the next turn; `hinted` maps preference kinds to values."""
    site = turn_site(episode)
    if site == "farewell":
        return {"role": "assistant", "content": FAREWELL}
    values = {
        preference.kind: chosen_value(rng, preference.kind, episode.user.told, hinted or {})
        for preference in preferences_of(episode.request.kind, site)
    }
    if episode.request.kind == "greet":
        return {"role": "assistant", "content": greeting(values["title"])}
    if site == "call":
        return assistant_call(
            TOOL_OF[episode.request.kind],
            call_arguments(episode.request, values),
            f"call_{rng.randrange(10**6)}",
        )
    assert episode.result is not None
    return {"role": "assistant", "content": answer_text(episode.result, values)}


def call_arguments(request: Request, values: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of the right call for `request`."""
    arguments = dict(request.slots)
    if request.kind == "hotels":
        arguments["sort"] = values["order"]
    elif request.kind == "book":
        arguments["room"] = values["room"]
    return arguments


def greeting(title: str) -> str:
    """The answer to a user who has only said hello."""
    return f"Hello{'' if title == 'plain' else f', {title}'}. How can I help?"


def answer_text(result: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """The answer that reports a tool result (`Episode.result`)."""
    arguments, value = result["arguments"], result["value"]
    if result["tool"] == "get_weather":
        degrees = value["temp_c"] if values["unit"] == "Celsius" else value["temp_f"]
        return f"In {values['unit']}: {degrees} in {arguments['city']}, {value['sky']}."
    if result["tool"] == "find_hotels":
        hotel = value["hotels"][0]
        price = f", {hotel['price']} a night" if values["detail"] == "priced" else ""
        return f"First in {arguments['city']}: {hotel['name']}{price}."
    if result["tool"] == "book_hotel":
        code = f", code {value['code']}" if values["code"] == "code" else ""
        return f"Booked {arguments['hotel']} for {arguments['nights']} nights{code}."
    amount = f"{arguments['amount']} {arguments['source']} is"
    if values["rounding"] == "about":
        return f"{amount} about {value['value'].split('.')[0]} {arguments['target']}."
    return f"{amount} {value['value']} {arguments['target']}."
