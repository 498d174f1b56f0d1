"""People who want something done, and silently want it in a certain way.

They state nothing beforehand. If the agent did not do what they wish, they say so in their next
message; once their patience has run out, they silently leave instead. If they are satisfied, they
go on. Seeded; they know neither models nor hints.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.own_agent.travel import Call, Travel
from benchmarks.own_agent.wishes import WISHES, Errand, Wish, shown_by_answer, shown_by_call

REQUESTS: dict[Errand, tuple[str, ...]] = {
    "greet": ("Hello there.", "Good day.", "Hi, can you help?", "I need help with a journey."),
    "weather": (
        "What is the temperature in {city} today?",
        "How cold is it in {city} today?",
        "Tell me the weather for {city} please.",
        "Is it warm in {city} today?",
    ),
    "hotels": (
        "Which hotel can I stay at in {city}?",
        "I look for a hotel in {city}.",
        "Please find me hotels in {city}.",
        "Tell me the hotels of {city}.",
    ),
    "book": (
        "Can you book {nights} nights at {hotel}?",
        "Book me {nights} nights at {hotel} please.",
        "Can you reserve {hotel} for {nights} nights?",
        "Please reserve {nights} nights at {hotel}.",
    ),
    "money": (
        "What is {amount} {source} in {target}?",
        "Please convert {amount} {source} to {target} for me.",
        "Tell me how much {amount} {source} is in {target}.",
        "I need {amount} {source} in {target}.",
    ),
}
TOOLS_OF: dict[Errand, str] = {
    "weather": "get_weather",
    "hotels": "find_hotels",
    "book": "book_hotel",
    "money": "convert_money",
}
LAST_WORDS = ("Thank you.", "Thanks, that is all.", "Good, thanks.")
MAX_FAILURES = 2
"""Failed calls of one request after which somebody leaves: a miscopied name stays miscopied."""
MOST_WISHES = 2
"""Wishes that one person has. With seven, a person would leave at the first unmet one, before
asking for anything else.
"""
SHARE_WITH_LAST_WORDS = 0.5
SHARE_THAT_GO_ON_AT_ONCE = 0.5
"""Share of objections whose message also contains the next request."""


def words_checksum(*further: object) -> str:
    """Eight hexadecimal digits that change when people's words change. `further` words are those of
    cells that need more.
    """
    said = (WISHES, REQUESTS, LAST_WORDS, *further)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What somebody wants done, in words, and the names and numbers in them."""

    errand: Errand
    text: str
    slots: Mapping[str, Any]


def new_request(rng: random.Random, errand: Errand, travel: Travel) -> Request:
    """A request with names of its own."""
    slots: dict[str, Any] = {}
    if errand in ("weather", "hotels"):
        slots = {"city": travel.name()}
    elif errand == "book":
        slots = {"hotel": travel.name(), "nights": rng.randint(2, 14)}
    elif errand == "money":
        slots = {"amount": rng.randint(2, 990)}
        slots |= {"source": travel.currency(), "target": travel.currency()}
    text = rng.choice(REQUESTS[errand]).format(**slots)
    return Request(errand=errand, text=text, slots=slots)


@dataclass(slots=True)
class Patience:
    """How often people still object: at most `limit` times to each kind of thing; None: always."""

    limit: int | None
    said: Counter[str] = field(default_factory=Counter)

    def has_left(self, kind: str) -> bool:
        """Whether somebody still objects to this."""
        return self.limit is None or self.said[kind] < self.limit

    def is_over(self, kinds: Sequence[str]) -> bool:
        """Whether nobody objects to any of these any more."""
        return not any(self.has_left(kind) for kind in kinds)


@dataclass(slots=True, kw_only=True)
class Person:
    """Somebody with errands, in this order, and silent wishes.

    `hear` and `see` return their next words: None to say nothing, "" to leave. `was_served`: the
    tool for the request has been called, without an objection.
    """

    rng: random.Random
    travel: Travel
    errands: list[Errand]
    wishes: Sequence[Wish]
    patience: Patience
    request: Request = field(init=False)
    was_served: bool = field(init=False, default=False)
    has_objected: bool = field(init=False, default=False)
    failures: int = field(init=False, default=0)
    is_leaving: bool = field(init=False, default=False)

    def ask(self) -> str:
        """The words of the next request."""
        self.request = new_request(self.rng, self.errands.pop(0), self.travel)
        self.was_served = self.request.errand not in TOOLS_OF
        self.has_objected, self.failures = False, 0
        return self.request.text

    def see(self, call: Call, result: Mapping[str, Any]) -> str | None:
        """Words about a call and its result, which the agent shows as they happen."""
        if "error" in result or call.arguments is None:
            self.failures += 1
            return "" if self.failures > MAX_FAILURES else None
        for wish in self._wishes("call"):
            if shown_by_call(wish, call.arguments) == wish.opposite:
                return self._object(wish)
        self.was_served = True
        return None

    def hear(self, text: str) -> str:
        """Words about an answer."""
        if self.is_leaving or not self.was_served:
            return ""
        for wish in self._wishes("answer"):
            if shown_by_answer(wish.kind, text) == wish.opposite:
                words = self._object(wish)
                goes_on = bool(words and self.errands)
                if goes_on and self.rng.random() < SHARE_THAT_GO_ON_AT_ONCE:
                    return f"{words} {self.ask()}"
                return words
        if self.errands:
            return self.ask()
        self.is_leaving = True
        has_words = self.rng.random() < SHARE_WITH_LAST_WORDS
        return self.rng.choice(LAST_WORDS) if has_words else ""

    def _wishes(self, site: str) -> list[Wish]:
        errand = self.request.errand
        return [wish for wish in self.wishes if wish.errand == errand and wish.site == site]

    def _object(self, wish: Wish) -> str:
        """The objection; "" without patience, or if they have already objected once."""
        if self.has_objected or not self.patience.has_left(wish.kind):
            return ""
        self.has_objected = True
        self.patience.said[wish.kind] += 1
        return self.rng.choice(wish.objections)


def wishes_of_one(rng: random.Random, wishes: Sequence[Wish]) -> Sequence[Wish]:
    """The wishes of one person: all of them, or MOST_WISHES of many."""
    return wishes if len(wishes) <= MOST_WISHES else rng.sample(wishes, MOST_WISHES)


def errands_for(rng: random.Random, wishes: Sequence[Wish]) -> list[Errand]:
    """What a person wants done in one session: what their wishes are about, in any order, and in
    half of the sessions something else as well. A greeting comes first.
    """
    wanted: list[Errand] = list(dict.fromkeys(wish.errand for wish in wishes))
    others: list[Errand] = [errand for errand in TOOLS_OF if errand not in wanted]
    if others and rng.random() < 0.5:
        wanted.append(rng.choice(others))
    rng.shuffle(wanted)
    return sorted(wanted, key=lambda errand: errand != "greet")
