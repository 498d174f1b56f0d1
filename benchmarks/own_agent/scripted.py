"""Scripted judges for the benchmark's controls: what they answer, without any HTTP.

    none        never a hint
    random      every answer at random, hints and texts drawn from the benchmark's lists
    contrary    for an objection, the hint for the opposite of the wish
    off-topic   for an objection, the hint of another kind

The last two answer the six questions about hints correctly, as far as the benchmark's own sentences
go; they also answer that such a hint is not a rule that the words ask for. A judge that `believes`
answers that it is, in keeping with its vote. `judging.py` serves them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from benchmarks.own_agent.people import REQUESTS, TOOLS_OF
from benchmarks.own_agent.turned import HINTS, TURNED
from benchmarks.own_agent.wishes import WISHES, Errand, Site, Wish, shown_by_answer, shown_by_call
from judge.hints import prompts as questions
from judge.votes import prompts as votes

JudgeKind = Literal["own", "none", "random", "contrary", "off-topic"]
JUDGES: tuple[JudgeKind, ...] = get_args(JudgeKind)
Value = tuple[str, str]
"""A kind of wish, and one of its two values."""

_MESSAGE = re.compile(r"\[(system|user|assistant|tool|feedback)\] ?(.*)", re.DOTALL)
_STARTS = re.compile(r"\n(?=\[(?:system|user|assistant|tool|feedback)\])")
_SECTION = re.compile(r"^# ([A-Z][^\n]*)$", re.MULTILINE)
_CALL = re.compile(r"^call (\w+)\((.*)\)$", re.MULTILINE)


def _sayings(wish: Wish) -> dict[str, Value]:
    return {
        **dict.fromkeys(wish.objections, (wish.kind, wish.wanted)),
        **dict.fromkeys(wish.open_opposites, (wish.kind, wish.opposite)),
    }


OBJECTIONS: dict[str, Value] = {
    words: (wish.kind, wish.wanted)
    for wish in (*WISHES.values(), *TURNED.values())
    for words in wish.objections
}
MEANINGS: dict[str, Value] = {
    **{text: (kind, value) for kind, texts in HINTS.items() for value, text in texts.items()},
    **{
        words: meaning
        for wish in (*WISHES.values(), *TURNED.values())
        for words, meaning in _sayings(wish).items()
    },
}
"""What each sentence of the benchmark asks for."""
ALL_HINTS = tuple(text for texts in HINTS.values() for text in texts.values())
OPEN_WISHES = tuple(
    words for wish in (*WISHES.values(), *TURNED.values()) for words in wish.open_opposites
)


def meaning_of(text: str, known: Mapping[str, Value] = MEANINGS) -> Value | None:
    """What the benchmark's longest sentence in a text asks for; None without any."""
    found = [words for words in known if words in text]
    return known[max(found, key=len)] if found else None


def other_value(value: Value) -> Value:
    """The other value of the same kind."""
    kind, wanted = value
    return kind, next(one for one in HINTS[kind] if one != wanted)


def another_kind(kind: str, wished: Sequence[str]) -> str:
    """A kind that shows in other requests, preferably one nobody wishes for; always the same."""
    kinds = list(WISHES)
    following = kinds[kinds.index(kind) + 1 :] + kinds[: kinds.index(kind)]
    elsewhere = [one for one in following if WISHES[one].errand != WISHES[kind].errand]
    return next((one for one in elsewhere if one not in wished), elsewhere[0])


def sections(text: str) -> dict[str, str]:
    """The sections of a judge's prompt by their first word."""
    parts = _SECTION.split(text)
    return {
        name.split()[0]: body.strip("\n")
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def messages_in(section: str) -> list[tuple[str, str]]:
    """(role, text) of each message of a section."""
    found = [_MESSAGE.fullmatch(part) for part in _STARTS.split(section)]
    return [(one.group(1), one.group(2)) for one in found if one is not None]


def errand_of(text: str) -> Errand | None:
    """What the last request in a user's message is about; None if it contains none."""
    found: list[tuple[int, Errand]] = []
    for errand, templates in REQUESTS.items():
        for template in templates:
            pattern = re.sub(r"\\\{\w+\\\}", r"[\\w-]+", re.escape(template))
            for match in re.finditer(pattern, text):
                found.append((match.start(), errand))
    return max(found)[1] if found else None


def situation(conversation: Sequence[tuple[str, str]]) -> tuple[Errand | None, Site]:
    """What the next response is about, and whether it is a call or an answer."""
    errand: Errand | None = None
    site: Site = "answer"
    for role, text in conversation:
        if role == "user":
            new = errand_of(text)
            said = meaning_of(text, OBJECTIONS)
            if new is not None:
                errand, site = new, "call" if new in TOOLS_OF else "answer"
            elif said is not None:
                errand, site = WISHES[said[0]].errand, WISHES[said[0]].site
        elif role == "tool":
            said = meaning_of(text, OBJECTIONS)
            is_call = '"error"' in text or (said is not None and WISHES[said[0]].site == "call")
            site = "call" if is_call else "answer"
    return errand, site


def shown_value(kind: str, response: str) -> str | None:
    """Which value of a kind a response shows, as shown to the judge; None for neither."""
    wish = WISHES[kind]
    called = _CALL.search(response)
    if wish.site == "answer":
        return None if called else shown_by_answer(kind, response)
    arguments = _object(called.group(2)) if called else None
    return None if arguments is None else shown_by_call(wish, arguments)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@dataclass(slots=True, kw_only=True)
class ScriptedJudge:
    """Answers one prompt of the judge at a time. `wished`: the kinds that people have wishes of."""

    kind: JudgeKind
    wished: tuple[str, ...]
    seed: int = 0
    believes: bool = False
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"judge-{self.seed}")

    def answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Its answer. Raises ValueError for a prompt that is not one of the judge's."""
        system, text = messages[0]["content"], messages[-1]["content"]
        if system.startswith(votes.SYSTEM):
            return self._vote(text)
        if system == questions.RELATION:
            return boxed(self._one_of(-1, 0, 1) if self.is_random else _relation(text))
        if system in (questions.RULE, questions.APPLIES, questions.FOLLOWED):
            ask = {questions.RULE: self._rule, questions.APPLIES: _applies}.get(system, _followed)
            is_so = self._one_of(True, False) if self.is_random else ask(text)
            return boxed(1 if is_so else -1)
        if system == questions.OPPOSITE:
            return marked(self.rng.choice(self._opposites(text)))
        if system == questions.OUTSIDE:
            return marked(self.rng.choice(self._outsides(text)))
        raise ValueError(f"not a prompt of the judge: {system[:80]!r}")

    @property
    def is_random(self) -> bool:
        """Whether it answers without reading."""
        return self.kind == "random"

    def _one_of(self, *values: int) -> int:
        return self.rng.choice(values)

    def _vote(self, text: str) -> str:
        if self.is_random:
            hint = self.rng.choice(ALL_HINTS)
            return f"{boxed(1)} {marked(hint)}" if self._one_of(True, False) else boxed(-1)
        said = meaning_of(sections(text).get("Next", ""), OBJECTIONS)
        if said is None or self.kind == "none":
            return boxed(-1)
        return f"{boxed(1)} {marked(self.hint_for(said))}"

    def hint_for(self, said: Value) -> str:
        """The hint for an objection that asks for this."""
        if self.kind == "off-topic":
            kind = another_kind(said[0], self.wished)
            said = (kind, WISHES[kind].wanted)
        elif self.kind == "contrary":
            said = other_value(said)
        return HINTS[said[0]][said[1]]

    def _rule(self, text: str) -> bool:
        """Whether a hint is what the words ask for or, if it `believes`, its own hint for them."""
        parts = sections(text)
        said = meaning_of(parts.get("Said", ""), OBJECTIONS)
        hint = parts.get("Instruction", "")
        if said is None:
            return False
        return self.hint_for(said) == hint if self.believes else said == meaning_of(hint)

    def _opposites(self, text: str) -> Sequence[str]:
        asked = meaning_of(sections(text).get("Instruction", ""))
        if self.is_random or asked is None:
            return OPEN_WISHES
        return [words for words in OPEN_WISHES if MEANINGS[words] == other_value(asked)]

    def _outsides(self, text: str) -> Sequence[str]:
        asked = meaning_of(sections(text).get("Instruction", ""))
        if self.is_random or asked is None:
            return OPEN_WISHES
        return [words for words in OPEN_WISHES if MEANINGS[words][0] != asked[0]]


def boxed(decision: int) -> str:
    """A decision as the judge writes it."""
    return rf"\boxed{{{decision}}}"


def marked(text: str) -> str:
    """A text as the judge writes it."""
    return f"[HINT_START]{text}[HINT_END]"


def _relation(text: str) -> int:
    parts = sections(text)
    first, second = (meaning_of(parts.get(name, "")) for name in ("First", "Second"))
    if first is None or second is None or first[0] != second[0]:
        return 0
    return 1 if first == second else -1


def _applies(text: str) -> bool:
    parts = sections(text)
    asked = meaning_of(parts.get("Instruction", ""))
    if asked is None:
        return False
    wish = WISHES[asked[0]]
    return (wish.errand, wish.site) == situation(messages_in(parts.get("Conversation", "")))


def _followed(text: str) -> bool:
    parts = sections(text)
    asked = meaning_of(parts.get("Instruction", ""))
    [(_, response)] = messages_in(parts.get("Response", "")) or [("", "")]
    return asked is not None and shown_value(asked[0], response) == asked[1]
