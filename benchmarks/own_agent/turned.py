"""The reversed wishes: the words of people who want what the untrained model mostly does, and of
those who openly want the other thing; and a hint for each value of each kind.

They are separate from `wishes.py` so that result files keep their names. Words and sentence forms
are as there: the lab's judge understands them (`reading.py --turned`), and the lab uses none.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.own_agent.wishes import WISHES, Wish

_OBJECTIONS: dict[str, tuple[str, ...]] = {
    "unit": (
        "Next time I want degrees Fahrenheit.",
        "Not Celsius, Fahrenheit please.",
        "We always want Fahrenheit.",
        "Can you give me Fahrenheit instead of Celsius?",
        "No Celsius for me. I want Fahrenheit.",
    ),
    "order": (
        "Next time I want the best rated first.",
        "We always want the best rated hotel first.",
        "Could I have a list by rating instead of the cheapest?",
        "I need the best rated first instead.",
        "You gave me the cheapest. I need hotels by rating.",
    ),
    "room": (
        "I need a room for one, I am one.",
        "Could I have a room for one instead of a double?",
        "I need a single instead of a double room.",
        "Next time I want a single room.",
        "We always want a room for one.",
    ),
    "rounding": (
        "Next time I want the exact amount.",
        "You gave me a round number. I need the exact amount.",
        "We always want the exact amount.",
        "Could I have the exact amount instead?",
        "I need the decimals instead.",
    ),
    "detail": (
        "Next time I want to know what it costs.",
        "I want the price of a night too.",
        "We always want the price too.",
        "Next time I want the price too.",
        "We always want the price of a night.",
    ),
    "code": (
        "Next time I want the booking code.",
        "You gave me a short note. I need the code too.",
        "We always want the booking code.",
        "Could I have the booking code instead of a short note?",
        "Next time I need to see the code.",
    ),
    "title": (
        "Next time I want no title.",
        "Not Captain, just a hello please.",
        "We always want a greeting without title.",
        "Next time I want a greeting without title.",
        "We always want no title.",
    ),
}
_OPEN: dict[str, tuple[str, ...]] = {
    "unit": (
        "Can you give me Celsius?",
        "Please, I need degrees in Celsius.",
        "Today I want Celsius.",
    ),
    "order": (
        "I would rather have the cheapest first.",
        "Please, I need the cheapest first.",
        "Today I want hotels by price.",
    ),
    "room": (
        "Can you give me a double room?",
        "Please, I need a room for two.",
        "Today I want a double room.",
    ),
    "rounding": (
        "Can you give me a round number?",
        "Please, I need no decimals.",
        "Today I want a round number.",
    ),
    "detail": (
        "Can you give me just the name?",
        "Please, I need only the name.",
        "Today I want just the name.",
    ),
    "code": (
        "Can you give me a short note?",
        "Please, I need it without the code.",
        "Today I want no code.",
    ),
    "title": (
        "Can you call me Captain?",
        "Please, I want to be called Captain.",
        "Today I want my title Captain.",
    ),
}


def turned(wish: Wish) -> Wish:
    """The same kind with the wish reversed, in words of its own."""
    return replace(
        wish,
        wanted=wish.opposite,
        opposite=wish.wanted,
        objections=_OBJECTIONS[wish.kind],
        open_opposites=_OPEN[wish.kind],
    )


TURNED: dict[str, Wish] = {kind: turned(wish) for kind, wish in WISHES.items()}

HINTS: dict[str, dict[str, str]] = {
    "unit": {
        "Celsius": "Say the temperature in Celsius.",
        "Fahrenheit": "Say the temperature in Fahrenheit.",
    },
    "order": {
        "price": "Give hotels by price, the cheapest first.",
        "rating": "Give hotels by rating, the best rated first.",
    },
    "room": {
        "double": "Reserve a double room, a room for two.",
        "single": "Reserve a single room, a room for one.",
    },
    "rounding": {
        "about": "Give a round amount without decimals.",
        "exact": "Give the exact amount with the decimals.",
    },
    "detail": {
        "name": "Say just the name of the hotel.",
        "priced": "Say the price of a night too.",
    },
    "code": {
        "short": "Confirm it short, without the code.",
        "code": "Confirm it with the booking code.",
    },
    "title": {
        "Captain": "Call the user Captain.",
        "plain": "Greet the user without title.",
    },
}
"""What an assistant would be told, by kind and value."""
