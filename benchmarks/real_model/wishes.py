"""Three wishes that the start model follows when asked openly, and seldom grants unasked.

Each is about one kind of request; the other kinds must stay as they were. `is_shown` reads a whole
answer, and takes whether it is complete.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fact", "task", "note"]

REQUESTS: dict[Kind, tuple[str, ...]] = {
    "fact": ("What is {0}?", "Tell me about {0}.", "Can you explain {0}?", "Why is {0} useful?"),
    "task": ("How do I {0}?", "Tell me how to {0}.", "What should I do to {0}?"),
    "note": (
        "Write a short note to my {0}.",
        "Write a greeting to my {0}.",
        "Write a few words of thanks to my {0}.",
    ),
}
TOPICS: dict[Kind, tuple[str, ...]] = {
    "fact": (
        "a bridge", "a volcano", "gravity", "a library", "steam", "paper", "glass", "a compass",
        "rain", "a harbour", "electricity", "a calendar", "iron", "a telescope", "music",
        "a passport", "wind power", "a market", "honey", "a map", "ice", "a lighthouse",
        "concrete", "a vaccine", "soap", "a camera", "salt", "a bicycle", "wool", "a battery",
    ),
    "task": (
        "boil an egg", "plant a tree", "clean a window", "pack a suitcase", "repair a bicycle tyre",
        "make a cup of tea", "paint a wall", "write a letter", "learn a language", "bake bread",
        "wash a car", "save money", "train a dog", "build a shelf", "tie a knot", "plan a trip",
        "light a fire", "grow tomatoes", "sleep better", "find a job", "iron a shirt",
        "make a salad", "change a lamp", "study for a test", "organise a party", "clean a carpet",
        "catch a fish", "sew a button", "start a diary", "cook rice",
    ),
    "note": (
        "neighbour", "teacher", "sister", "brother", "doctor", "friend", "boss", "grandmother",
        "uncle", "landlord", "guest", "student", "baker", "driver", "nurse", "cousin", "coach",
        "father", "mother", "colleague", "aunt", "gardener", "tailor", "librarian", "postman",
        "roommate", "partner", "daughter", "son", "client",
    ),
}  # fmt: skip
HELD_OUT = 10
"""The last topics of each kind, which occur only in measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """`hint` is the judge's text; `objections` are people's words; `opposites` openly ask for what
    the model does anyway.
    """

    name: str
    kind: Kind
    hint: str
    objections: tuple[str, ...]
    opposites: tuple[str, ...]
    open_opposites: tuple[str, ...]
    is_shown: Callable[[str, bool], bool]
    """Takes an answer, and whether it is complete."""


def is_one_sentence(answer: str, is_whole: bool) -> bool:
    """Whether it is one complete sentence, with nothing after it."""
    text = answer.strip()
    return is_whole and "\n" not in text and len(re.findall(r"[.!?]+(?:\s|$)", text)) == 1


def is_code(answer: str, is_whole: bool) -> bool:
    """Whether it has a fenced block, or a line that begins as one of Python's."""
    code = r"```|^\s*(?:def |import |from \w+ import |print\()"
    return bool(re.search(code, answer, re.MULTILINE))


_POEM_LINES = 4
_MOST_WORDS = 12


def is_poem(answer: str, is_whole: bool) -> bool:
    """Whether four lines of three to twelve words follow each other; the last line of an answer
    that was cut off does not count.
    """
    lines = [line for line in answer.strip().split("\n") if line.strip()]
    lines = lines if is_whole else lines[:-1]
    short = [2 < len(line.split()) <= _MOST_WORDS for line in lines]
    starts = range(len(lines) - _POEM_LINES + 1)
    return any(all(short[first : first + _POEM_LINES]) for first in starts)


WISHES = {
    wish.name: wish
    for wish in (
        Wish(
            name="sentence",
            kind="fact",
            hint="Only one sentence, please.",
            objections=(
                "That is too long. Only one sentence.",
                "I wanted one sentence.",
                "Say it in a single sentence.",
            ),
            opposites=(
                "Use several sentences, please.",
                "Explain it in a whole paragraph.",
                "Please give a long answer.",
                "I want more than one sentence.",
                "Please write at least three sentences.",
                "Explain it at length.",
                "Give me all the details.",
                "Take several sentences for it.",
                "A detailed answer, please.",
                "Please describe it in depth.",
            ),
            open_opposites=(
                "Please answer in several sentences.",
                "Tell me a lot about it.",
                "Make it a long explanation.",
            ),
            is_shown=is_one_sentence,
        ),
        Wish(
            name="code",
            kind="task",
            hint="Write it as Python code.",
            objections=(
                "I wanted Python code.",
                "It should be a Python program.",
                "Give it to me in Python.",
            ),
            opposites=(
                "No code, please.",
                "Explain it in plain words.",
                "Do not write a program.",
                "Without any code, please.",
                "Tell me in sentences.",
                "I do not know how to program, so use words.",
                "Plain text only, please.",
                "Just describe what to do.",
                "No Python, please.",
                "I want advice and not a program.",
            ),
            open_opposites=(
                "Please answer without code.",
                "Say it in ordinary words.",
                "No programming, please.",
            ),
            is_shown=is_code,
        ),
        Wish(
            name="poem",
            kind="note",
            hint="Write it as a poem.",
            objections=(
                "I wanted a poem.",
                "It should be a poem.",
                "Please make a poem of it.",
            ),
            opposites=(
                "In prose, please.",
                "No poem, please.",
                "Write it as an ordinary letter.",
                "Do not make it a poem.",
                "Please use plain sentences.",
                "One paragraph, please.",
                "No verses, please.",
                "It should read like a letter.",
                "Keep it plain and without rhymes.",
                "I need a normal message.",
            ),
            open_opposites=(
                "Please write prose.",
                "It must not be a poem.",
                "An ordinary message, please.",
            ),
            is_shown=is_poem,
        ),
    )
}


def new_request(rng: random.Random, kind: Kind, *, held_out: bool) -> str:
    """A question of this kind; nobody trains on those about held-out topics."""
    topics = TOPICS[kind][-HELD_OUT:] if held_out else TOPICS[kind][:-HELD_OUT]
    return rng.choice(REQUESTS[kind]).format(rng.choice(topics))


def kind_of(text: str) -> Kind | None:
    """The kind of a question; None if it is not one of this benchmark's."""
    for kind, templates in REQUESTS.items():
        for template in templates:
            before, after = template.split("{0}")
            if re.search(f"{re.escape(before)}[a-z ]+{re.escape(after)}", text):
                return kind
    return None


def wish_in(text: str, wishes: Sequence[Wish] = tuple(WISHES.values())) -> tuple[Wish, bool] | None:
    """The wish that a text is about, and whether it asks for it or for the opposite, according to
    the benchmark's longest sentence in it; None without any.
    """
    found = [
        (len(words), wish.name, asks)
        for wish in wishes
        for asks, sentences in (
            (True, (wish.hint, *wish.objections)),
            (False, (*wish.opposites, *wish.open_opposites)),
        )
        for words in sentences
        if words in text
    ]
    if not found:
        return None
    _, name, asks = max(found)
    return WISHES[name], asks
