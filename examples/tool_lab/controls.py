"""The lab's controls: what the teacher is shown in place of the judge's hint.

If the policy also learned from a hint that says nothing, or the wrong thing, the lab's success
would not be due to the hint. `none` shows the teacher the original prompt, `off-topic` an
instruction about another kind of request, `contrary` the opposite of what the user asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from examples.tool_lab.lab_config import HintMode
from examples.tool_lab.preferences import OTHER_KINDS, PREFERENCES
from records.types import TurnRecord

RewriteHint = Callable[[TurnRecord, str], str | None]


def rewrite_for(mode: HintMode) -> RewriteHint | None:
    """The scoring worker's hook for `mode`; None leaves the judge's hints alone."""
    rewrites: dict[HintMode, RewriteHint | None] = {
        "judge": None,
        "none": lambda turn, hint: None,
        "off-topic": off_topic,
        "contrary": contrary,
    }
    return rewrites[mode]


def off_topic(turn: TurnRecord, hint: str) -> str:
    """A hint that the model knows, about a request that this turn is not about."""
    kind = turn_kind(turn)
    choices = [
        text
        for other in OTHER_KINDS
        for texts in PREFERENCES[other].hints.values()
        for text in texts
        if PREFERENCES[other].request_kind != PREFERENCES[kind].request_kind
    ]
    return random.Random(turn.turn_id).choice(choices)


def contrary(turn: TurnRecord, hint: str) -> str:
    """The hint for the value that the lab's users do not want."""
    preference = PREFERENCES[turn_kind(turn)]
    return random.Random(turn.turn_id).choice(preference.hints[preference.default])


def turn_kind(turn: TurnRecord) -> str:
    """The preference that the turn was last about: "order", "unit" or "title"."""
    calls = [
        call["function"]["name"]
        for message in [*turn.messages, turn.response]
        for call in message.get("tool_calls") or ()
    ]
    if calls and calls[-1] == "find_hotels":
        return "order"
    says_hello = not calls and str(turn.response.get("content") or "").startswith("Hello")
    return "title" if says_hello else "unit"
