"""What people silently wish for, in which words they object, and the words of people who openly
want the opposite.

Whole sentences, none of which the lab's users say, so its model has not read them. They consist of
words that it knows, in forms that it understands: its judge makes nothing of "Say it in Celsius
next time.", but gives the right hint for "Next time I want degrees Celsius." `reading.py` shows how
each is read. Every wish is for what the untrained model does in a minority of cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Site = Literal["call", "answer"]
Errand = Literal["greet", "weather", "hotels", "book", "money"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One kind of wish. It shows in `site` of requests of one `errand`: in the argument of a call
    (`argument`), or in an answer's words.

    `wanted` and `opposite` are its two values; the untrained model mostly does the opposite.
    `objections` ask for `wanted` after the fact, `open_opposites` for `opposite` beforehand.
    """

    kind: str
    errand: Errand
    site: Site
    wanted: str
    opposite: str
    objections: tuple[str, ...]
    open_opposites: tuple[str, ...]
    argument: str | None = None


UNIT = Wish(
    kind="unit",
    errand="weather",
    site="answer",
    wanted="Celsius",
    opposite="Fahrenheit",
    objections=(
        "Next time I want degrees Celsius.",
        "I would rather have Celsius.",
        "Not Fahrenheit, Celsius please.",
        "We always want Celsius.",
        "Can you give me Celsius instead of Fahrenheit?",
        "No Fahrenheit for me. I want Celsius.",
    ),
    open_opposites=(
        "I would rather have Fahrenheit.",
        "Can you give me Fahrenheit?",
        "Please, I need degrees in Fahrenheit.",
        "Today I want Fahrenheit.",
    ),
)
ORDER = Wish(
    kind="order",
    errand="hotels",
    site="call",
    argument="sort",
    wanted="price",
    opposite="rating",
    objections=(
        "Next time I want the cheapest first.",
        "I would rather have hotels by price.",
        "We always want the cheapest hotel first.",
        "Could I have a list by price instead of the best rated?",
        "I need the cheapest first instead.",
        "You gave me the best rated. I need hotels by price.",
    ),
    open_opposites=(
        "I would rather have the best rated first.",
        "Can you give me hotels by rating?",
        "Please, I need the best rated first.",
        "Today I want hotels by rating.",
    ),
)
ROOM = Wish(
    kind="room",
    errand="book",
    site="call",
    argument="room",
    wanted="double",
    opposite="single",
    objections=(
        "Next time I want a room for two.",
        "I would rather have a double room.",
        "You gave me a single. I need a double room.",
        "Do you have a double room for me? I need no single.",
        "Could I have a room for two instead of a single?",
        "I need a room for two, we are two.",
    ),
    open_opposites=(
        "I would rather have a single.",
        "Can you give me a single room?",
        "Please, I need a room for one.",
        "Today I want a single room.",
    ),
)
ROUNDING = Wish(
    kind="rounding",
    errand="money",
    site="answer",
    wanted="about",
    opposite="exact",
    objections=(
        "Next time I want no decimals.",
        "I would rather have a round number.",
        "You gave me the cents. I need a round number.",
        "We always want a round number.",
        "Could I have a round number instead?",
        "I need a round amount instead.",
    ),
    open_opposites=(
        "I would rather have the exact amount.",
        "Can you give me all the decimals?",
        "Please, I need the cents too.",
        "Today I want the exact amount.",
    ),
)
DETAIL = Wish(
    kind="detail",
    errand="hotels",
    site="answer",
    wanted="name",
    opposite="priced",
    objections=(
        "Next time I want just the name.",
        "I would rather have only the name.",
        "You gave me the price. I need only the name.",
        "We always want just the name.",
        "Could I have only the name instead?",
        "Not the price, just the name please.",
    ),
    open_opposites=(
        "I would rather have the price too.",
        "I asked for the price too.",
        "Please, I need the price of a night.",
        "Today I need the price too.",
    ),
)
CODE = Wish(
    kind="code",
    errand="book",
    site="answer",
    wanted="short",
    opposite="code",
    objections=(
        "Next time I want a short answer.",
        "I would rather have no code.",
        "You gave me the code. I need no code.",
        "We always want a short note.",
        "Do you have a short note for me? I need no code.",
        "Next time I want it without the code.",
    ),
    open_opposites=(
        "I would rather have the booking code.",
        "Can you give me the code too?",
        "Please, I need to see the code.",
        "Today I want the booking code.",
    ),
)
TITLE = Wish(
    kind="title",
    errand="greet",
    site="answer",
    wanted="Captain",
    opposite="plain",
    objections=(
        "Next time I want to be called Captain.",
        "I would rather have my title Captain.",
        "Not just a hello, my title please.",
        "We always want my title Captain.",
        "Could I have my title instead of just a hello?",
        "No plain hello for me. I want Captain.",
    ),
    open_opposites=(
        "I would rather have no title.",
        "Can you give me just a hello?",
        "Please, I need a greeting without title.",
        "Today I want no title.",
    ),
)
WISHES: dict[str, Wish] = {
    wish.kind: wish for wish in (UNIT, ORDER, ROOM, ROUNDING, DETAIL, CODE, TITLE)
}

_MARKS: dict[str, tuple[str, str, str]] = {
    # kind: what an answer has or has not, the value if it has, the value if not
    "rounding": ("about", "about", "exact"),
    "detail": ("a night", "priced", "name"),
    "code": ("code", "code", "short"),
    "title": ("Captain", "Captain", "plain"),
}


def shown_by_answer(kind: str, text: str) -> str | None:
    """Which value of a wish an answer's words show; None if they show neither, or both."""
    if not text.strip():
        return None
    if kind == "unit":
        named = [unit for unit in ("Celsius", "Fahrenheit") if unit in text]
        return named[0] if len(named) == 1 else None
    mark, with_it, without_it = _MARKS[kind]
    return with_it if mark in text else without_it


def shown_by_call(wish: Wish, arguments: Mapping[str, Any]) -> str | None:
    """Which value of a wish a call's arguments show; None if they show neither."""
    value = arguments.get(wish.argument or "")
    return value if value in (wish.wanted, wish.opposite) else None
