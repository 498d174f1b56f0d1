"""Users with hidden preferences: what they ask, and how they react in words to what the assistant
did.

A user never names a preference unless it is violated (or, in a share of requests, stated openly).
Answers are corrected by the next user message; a tool call is corrected when the agent asks for
consent, and the user's words come back as the tool's result. Pure and seeded; users know neither
models nor hints.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.tool_lab.domain import World
from examples.tool_lab.names import random_currency, random_name
from examples.tool_lab.phrases import (
    COMPLAINTS,
    CORRECTIONS,
    NEXT,
    PRAISES,
    REQUESTS,
    STATED,
    THANKS,
    phrase_wish,
    surface,
)
from examples.tool_lab.preferences import (
    PREFERENCES,
    preferences_of,
    shown_in_answer,
    shown_in_call,
)


@dataclass(slots=True, kw_only=True)
class Request:
    """What the user wants now. `slots` are its entities; `stated` the preference values it names
    openly.
    """

    kind: str
    slots: dict[str, Any]
    stated: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class User:
    """One user: hidden `preferences` (kind -> value), `open_wishes` that they mind only once they
    have said them, and what they have said so far (`told`).
    """

    rng: random.Random
    preferences: Mapping[str, str]
    state_probability: float = 0.0
    open_wishes: Mapping[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    last_kind: str | None = None

    def ask(self, kind: str, world: World) -> tuple[Request, str]:
        """A new request of `kind` and its words; its names are added to `world`."""
        request = Request(kind=kind, slots=self._slots(kind, world))
        text = self.rng.choice(REQUESTS[kind]).format(**request.slots)
        statable = [
            p
            for p in PREFERENCES.values()
            # Users with open wishes state only those: no lesson is about another kind.
            if p.request_kind == kind and (not self.open_wishes or p.kind in self.open_wishes)
        ]
        # A wish stated right after a request of the same kind would read as a correction of its
        # answer.
        is_new_kind = kind != self.last_kind
        self.last_kind = kind
        if statable and is_new_kind and self.rng.random() < self.state_probability:
            preference = self.rng.choice(statable)
            value = (
                self.preferences.get(preference.kind)
                or self.open_wishes.get(preference.kind)
                or self.rng.choice((preference.default, preference.alternative))
            )
            request.stated[preference.kind] = value
            self.told[preference.kind] = value
            text = f"{text} {phrase_wish(self.rng, STATED, preference, value)}"
        return request, surface(self.rng, text)

    def _slots(self, kind: str, world: World) -> dict[str, Any]:
        rng = self.rng
        if kind in ("weather", "hotels"):
            known = sorted(world.cities)
            city = (
                rng.choice(known)
                if known and rng.random() < 0.3
                else random_name(rng, held_out=world.held_out)
            )
            world.cities.add(city)
            return {"city": city}
        if kind == "book":
            known = sorted(world.hotels)
            hotel = (
                rng.choice(known)
                if known and rng.random() < 0.5
                else random_name(rng, held_out=world.held_out)
            )
            world.hotels.add(hotel)
            return {"hotel": hotel, "nights": rng.randint(2, 14)}
        source, target = (random_currency(rng, held_out=world.held_out) for _ in range(2))
        world.currencies.update((source, target))
        return {"amount": rng.randint(2, 990), "source": source, "target": target}

    def wants(self, kind: str) -> str | None:
        """The value that this user cares about: a hidden preference, or what they said openly."""
        return self.preferences.get(kind) or self.told.get(kind)

    def review_call(self, request: Request, arguments: Any) -> str | None:
        """The user's objection to a tool call, in words, or None if they consent."""
        for preference in preferences_of(request.kind, "call"):
            wanted = self.wants(preference.kind)
            shown = shown_in_call(preference, arguments)
            if wanted is not None and shown is not None and shown != wanted:
                self.told[preference.kind] = wanted
                return phrase_wish(self.rng, CORRECTIONS, preference, wanted)
        return None

    def review_answer(self, request: Request, text: str) -> tuple[str, str, str] | None:
        """`(preference kind, wanted value, words)` if the answer violates one, else None."""
        for preference in preferences_of(request.kind, "answer"):
            wanted = self.wants(preference.kind)
            shown = shown_in_answer(preference, text)
            if wanted is not None and shown is not None and shown != wanted:
                self.told[preference.kind] = wanted
                words = phrase_wish(self.rng, CORRECTIONS, preference, wanted)
                return preference.kind, wanted, words
        return None

    def praise(self, request: Request, text: str) -> str:
        """Words of a satisfied user: often plain thanks, sometimes praise of what was wanted."""
        for preference in preferences_of(request.kind, "answer"):
            wanted = self.preferences.get(preference.kind)
            is_met = wanted is not None and wanted == shown_in_answer(preference, text)
            if wanted is not None and is_met and self.rng.random() < 0.3:
                return phrase_wish(self.rng, PRAISES, preference, wanted)
        return self.rng.choice(THANKS)

    def complain(self, request: Request) -> str:
        """Words for an assistant that answered without using a tool."""
        return self.rng.choice(COMPLAINTS[request.kind]).format(**request.slots)

    def lead_in(self) -> str:
        """The start of a further request."""
        return self.rng.choice(NEXT)
