"""Three wishes that the start model follows when asked openly, and seldom grants unasked.

Each is about one kind of request; the other kinds must stay as they were. `is_shown` reads a whole
answer; one that was cut off shows nothing, except possibly French.
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


def is_numbered(answer: str, is_whole: bool) -> bool:
    """Whether its first numbered lines begin with 1., 2. and 3."""
    numbers = re.findall(r"^\s*\**(\d+)[.)]", answer, re.MULTILINE)
    return numbers[:3] == ["1", "2", "3"]


_FRENCH = (
    "le la les un une des de du et est je vous nous pour que qui dans avec votre mon ma mes à au "
    "cher chère merci bonjour sur pas ce cette il elle sont être avoir plus très"
)
_ENGLISH = (
    "the a an and is are i you we for that who in with your my to of on not this it have be has "
    "dear thank thanks hello was will at as"
)


def is_french(answer: str, is_whole: bool) -> bool:
    """Whether it has more French than English function words, and at least three."""
    words = re.findall(r"[a-zàâçéèêëîïôûùü]+", answer.lower())
    french, english = (sum(word in of.split() for word in words) for of in (_FRENCH, _ENGLISH))
    return french >= 3 and french > english


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
            name="steps",
            kind="task",
            hint="List the steps as 1., 2., 3.",
            objections=(
                "I wanted numbered steps.",
                "Please number the steps.",
                "Give it as 1., 2., 3.",
            ),
            opposites=(
                "Do not number anything.",
                "Write it as plain text without a list.",
                "One flowing paragraph, please.",
                "No list, please.",
                "Answer in prose, without numbers.",
                "Please write it as running text.",
                "Tell me in one paragraph.",
                "Without any list or numbers, please.",
                "Just describe it in sentences.",
                "I do not want a numbered list.",
            ),
            open_opposites=(
                "Please answer without a list.",
                "Write it as one paragraph.",
                "No numbers, just sentences.",
            ),
            is_shown=is_numbered,
        ),
        Wish(
            name="french",
            kind="note",
            hint="Answer in French.",
            objections=(
                "It should be in French.",
                "I wanted it in French.",
                "Please, in French.",
            ),
            opposites=(
                "In English, please.",
                "Write it in English.",
                "Use English for it.",
                "It has to be in English.",
                "English only, please.",
                "Please use plain English.",
                "My reader speaks English.",
                "Answer me in English.",
                "I need an English text.",
                "Keep it in English.",
            ),
            open_opposites=(
                "Please write in English.",
                "The text should be English.",
                "English, please.",
            ),
            is_shown=is_french,
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
