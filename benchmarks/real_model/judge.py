"""The rule that acts as the judge: it votes on turns and answers the six questions about hints. It
is right as far as the sentences of this benchmark go.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.own_agent.scripted import boxed, marked, messages_in, sections
from benchmarks.real_model.wishes import WISHES, kind_of, wish_in
from judge.hints import prompts as questions
from judge.votes import prompts as votes


@dataclass(slots=True, kw_only=True)
class RuleJudge:
    """Answers one prompt of the judge at a time."""

    seed: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"judge-{self.seed}")

    def answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Its answer. Raises ValueError for a prompt that is not one of the judge's."""
        system, text = messages[0]["content"], messages[-1]["content"]
        parts = sections(text)
        if system.startswith(votes.SYSTEM):
            said = wish_in(parts.get("Next", ""))
            is_objection = said is not None and said[1]
            return f"{boxed(1)} {marked(said[0].hint)}" if said and is_objection else boxed(-1)
        if system == questions.RELATION:
            return boxed(_relation(parts))
        if system == questions.RULE:
            hint, said = (wish_in(parts.get(name, "")) for name in ("Instruction", "Said"))
            return boxed(1 if hint is not None and hint == said else -1)
        if system == questions.APPLIES:
            return boxed(1 if _applies(parts) else -1)
        if system == questions.FOLLOWED:
            return boxed(1 if _followed(parts) else -1)
        asked = wish_in(parts.get("Instruction", ""))
        if system == questions.OPPOSITE and asked is not None:
            return marked(self.rng.choice(asked[0].opposites))
        if system == questions.OUTSIDE and asked is not None:
            others = [one for one in WISHES.values() if one is not asked[0]]
            return marked(self.rng.choice(others).hint)
        raise ValueError(f"not a prompt of the judge: {system[:80]!r}")


def _relation(parts: Mapping[str, str]) -> int:
    first, second = (wish_in(parts.get(name, "")) for name in ("First", "Second"))
    if first is None or second is None or first[0] is not second[0]:
        return 0
    return 1 if first[1] is second[1] else -1


def _applies(parts: Mapping[str, str]) -> bool:
    """Whether the user's last question is of the hint's kind."""
    asked = wish_in(parts.get("Instruction", ""))
    said = [text for role, text in messages_in(parts.get("Conversation", "")) if role == "user"]
    kinds = [kind for kind in map(kind_of, said) if kind is not None]
    return asked is not None and bool(kinds) and kinds[-1] == asked[0].kind


def _followed(parts: Mapping[str, str]) -> bool:
    asked = wish_in(parts.get("Instruction", ""))
    if asked is None:
        return False
    wish, asks = asked
    [(_, response)] = messages_in(parts.get("Response", "")) or [("", "")]
    # A judge does not see whether an answer was cut off: one without final punctuation was.
    is_whole = response.rstrip().endswith((".", "!", "?"))
    return wish.is_shown(response, is_whole) is asks
