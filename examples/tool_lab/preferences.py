"""Seven kinds of preference: where each shows, and the words that users and hints use for it.

A preference has two values. The untrained model shows the default most of the time; the alternative
is what the lab's users want. `site` is the turn that decides it: a tool call (through one argument)
or the answer's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One kind of preference. `default` and `alternative` are its values, as written in an argument
    or a marker.

    `wishes[value]` are noun phrases for what a user wants, `hints[value]` whole instructions;
    `unasked_share` is how often the scripted assistant shows the alternative unasked.
    """

    kind: str
    request_kind: str
    site: str
    argument: str | None
    default: str
    alternative: str
    wishes: Mapping[str, tuple[str, ...]]
    hints: Mapping[str, tuple[str, ...]]
    unasked_share: float = 0.18

    def other(self, value: str) -> str:
        """The value that is not `value`."""
        return self.alternative if value == self.default else self.default


UNIT = Preference(
    kind="unit",
    request_kind="weather",
    site="answer",
    argument=None,
    default="Fahrenheit",
    alternative="Celsius",
    wishes={
        "Fahrenheit": ("Fahrenheit", "degrees in Fahrenheit", "it in Fahrenheit"),
        "Celsius": ("Celsius", "degrees in Celsius", "it in Celsius"),
    },
    hints={
        "Fahrenheit": (
            "Give temperatures in Fahrenheit.",
            "Answer in Fahrenheit.",
            "Always state the temperature in Fahrenheit.",
            "Use Fahrenheit for the temperature.",
        ),
        "Celsius": (
            "Give temperatures in Celsius.",
            "Answer in Celsius.",
            "Always state the temperature in Celsius.",
            "Use Celsius for the temperature.",
        ),
    },
)

ORDER = Preference(
    kind="order",
    request_kind="hotels",
    site="call",
    argument="sort",
    default="rating",
    alternative="price",
    wishes={
        "rating": ("hotels by rating", "the best rated first", "them sorted by rating"),
        "price": ("hotels by price", "the cheapest first", "them sorted by price"),
    },
    hints={
        "rating": (
            "Sort hotels by rating.",
            "Find hotels with sort rating.",
            "Always sort the hotels by rating.",
            "List the best rated hotels first.",
        ),
        "price": (
            "Sort hotels by price.",
            "Find hotels with sort price.",
            "Always sort the hotels by price.",
            "List the cheapest hotels first.",
        ),
    },
)

ROOM = Preference(
    kind="room",
    request_kind="book",
    site="call",
    argument="room",
    default="single",
    alternative="double",
    wishes={
        "single": ("a single room", "a room for one", "a single"),
        "double": ("a double room", "a room for two", "a double"),
    },
    hints={
        "single": (
            "Book a single room.",
            "Always take a single room.",
            "Use room single for the booking.",
        ),
        "double": (
            "Book a double room.",
            "Always take a double room.",
            "Use room double for the booking.",
        ),
    },
)

ROUNDING = Preference(
    kind="rounding",
    request_kind="money",
    site="answer",
    argument=None,
    default="exact",
    alternative="about",
    wishes={
        "exact": ("the exact amount", "all the decimals", "the cents too"),
        "about": ("a round number", "no decimals", "a rounded amount"),
    },
    hints={
        "exact": ("Give the exact amount.", "Keep the decimals.", "Do not round the amount."),
        "about": ("Give a round number.", "Leave out the decimals.", "Round the amount."),
    },
)

DETAIL = Preference(
    kind="detail",
    request_kind="hotels",
    site="answer",
    argument=None,
    default="priced",
    alternative="name",
    wishes={
        "priced": ("the price too", "to know what it costs", "the price of a night"),
        "name": ("only the name", "just the name", "the name and nothing more"),
    },
    hints={
        "priced": ("Give the price of the hotel.", "Say what a night costs.", "Add the price."),
        "name": (
            "Give only the name.",
            "Answer with only the name.",
            "Say only the hotel name.",
        ),
    },
)

CODE = Preference(
    kind="code",
    request_kind="book",
    site="answer",
    argument=None,
    default="code",
    alternative="short",
    wishes={
        "code": ("the code too", "the booking code", "to see the code"),
        "short": ("no code", "it without the code", "a short note without code"),
    },
    hints={
        "code": ("Give the booking code.", "Add the code to the answer.", "Say the booking code."),
        "short": (
            "Give a short answer.",
            "Keep the answer short.",
            "Confirm in a short answer.",
        ),
    },
)

TITLE = Preference(
    kind="title",
    request_kind="greet",
    site="answer",
    argument=None,
    default="plain",
    alternative="Captain",
    wishes={
        "plain": ("no title", "a greeting without title", "just a hello"),
        "Captain": ("my title Captain", "to be called Captain", "a greeting with Captain"),
    },
    hints={
        "plain": ("Greet without a title.", "Leave out the title.", "Use no title at all."),
        "Captain": (
            "Greet the user as Captain.",
            "Address the user as Captain.",
            "Always say Captain to the user.",
        ),
    },
    # Almost never sampled: objectives differ in how they treat such a behaviour.
    unasked_share=0.04,
)

PREFERENCES: dict[str, Preference] = {
    preference.kind: preference for preference in (UNIT, ORDER, ROOM, ROUNDING, DETAIL, CODE, TITLE)
}
TRAINABLE_KINDS = ("unit", "order", "title")
TRAINED_KINDS = ("unit", "order")
"""What the lab trains unless told otherwise."""
OTHER_KINDS = ("room", "rounding", "detail", "code")


def lab_users(kinds: Sequence[str]) -> dict[str, str]:
    """The hidden preferences of the lab's users: the alternative of each of `kinds`."""
    return {kind: PREFERENCES[kind].alternative for kind in kinds}


def preferences_of(request_kind: str, site: str) -> list[Preference]:
    """The preferences that a turn of this request and site decides (none or one)."""
    return [
        preference
        for preference in PREFERENCES.values()
        if preference.request_kind == request_kind and preference.site == site
    ]


def shown_in_answer(preference: Preference, text: str) -> str | None:
    """Which value an answer's text shows; None if it shows none or both."""
    if preference.kind == "unit":
        shown = [value for value in ("Fahrenheit", "Celsius") if value in text]
        return shown[0] if len(shown) == 1 else None
    marker, with_marker, without_marker = {
        "rounding": ("about", "about", "exact"),
        "detail": ("a night", "priced", "name"),
        "code": ("code", "code", "short"),
        "title": ("Captain", "Captain", "plain"),
    }[preference.kind]
    return with_marker if marker in text else without_marker


def shown_in_call(preference: Preference, arguments: Any) -> str | None:
    """Which value a call's arguments show; None if they show none."""
    value = arguments.get(preference.argument) if isinstance(arguments, Mapping) else None
    return value if value in (preference.default, preference.alternative) else None
