"""What users said about a hint: which of their words express it, and which make it a rule.

The teacher is asked about the first, the judge about the second; each about a source once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from judge.hints.questions import HintQuestions
from records.feedback.feedback import ROLE
from records.hints.memory import words_of
from records.hints.types import Hint, HintSource
from records.types import TurnRecord
from rollout_bridge.scoring.scoring import places_left

CHECKED = 8
"""How many of a hint's newest sources are looked at."""
SPOKEN_PART = 0.25
"""A user's words express a hint if they have at least this share of its effect on the answer.
Requests that do not mention it hardly ever have a tenth (docs/learning.md).
"""
_PEOPLE = ("user", ROLE)
_REMEMBERED = 4096
"""How many answers of teacher and judge are kept, so that nothing is asked twice."""


class TurnSource(Protocol):
    """Loads turns."""

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCheck:
    """What a hint must do to the answers that it came from. `fall` asks the teacher by how many
    nats it lowers the log-prob of a token of a turn's answer (None: unknown); it must be `least` or
    more. `part_of_words` asks which part of that the user's own words achieve. Both raise
    ServiceUnavailable.
    """

    fall: Callable[[TurnRecord, str], Awaitable[float | None]]
    least: float
    part_of_words: Callable[[TurnRecord, str, str], Awaitable[float | None]]

    async def left(self, turn: TurnRecord, text: str) -> list[str]:
        """Which of a turn's candidates, `text` included, are left; see `places_left`."""
        candidates = [text, *(other for other in turn.candidates if other != text)]
        falls = [await self.fall(turn, one) for one in candidates]
        return [candidates[place] for place in places_left(falls, self.least)]


class UserWords:
    """Asks about the words that came after the answers of a hint's sources. Without a `check`, no
    teacher is asked.
    """

    def __init__(
        self, store: TurnSource, questions: HintQuestions, check: SourceCheck | None
    ) -> None:
        self._store, self._questions, self._check = store, questions, check
        self._rules: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._spoken: OrderedDict[tuple[str, str], bool | None] = OrderedDict()

    async def is_spoken(self, hint: Hint, source: HintSource) -> bool | None:
        """Whether the teacher finds that the user's words after a source's answer speak against it
        as the hint does; None if there are no such words or it cannot tell. Asked once.
        """
        if self._check is None:
            return None
        key = (hint.hint_id, source.turn_id)
        if key not in self._spoken:
            self._spoken[key] = await self._asked_if_spoken(self._check, hint, source)
            if len(self._spoken) > _REMEMBERED:
                self._spoken.popitem(last=False)
        return self._spoken[key]

    async def _asked_if_spoken(
        self, check: SourceCheck, hint: Hint, source: HintSource
    ) -> bool | None:
        turns = await self._store.load_turns([source.turn_id])
        said = [one for turn in turns for one in turn.next_state if one["role"] in _PEOPLE]
        words = words_of(said)
        if not words:
            return None
        part = await check.part_of_words(turns[0], hint.text, words)
        return None if part is None else part >= SPOKEN_PART

    async def is_rule(self, hint: Hint, source: HintSource) -> bool | None:
        """Whether a source's words make the hint a rule; asked once for each source."""
        key = (hint.hint_id, source.turn_id)
        if key not in self._rules:
            self._rules[key] = await self._questions.is_rule(hint.text, source.words)
            if len(self._rules) > _REMEMBERED:
                self._rules.popitem(last=False)
        return self._rules[key]

    async def last_spoken(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When, according to the teacher, a user's words last expressed the hint, in unix seconds;
        -inf if none of the newest did.
        """
        for source in sources[:CHECKED]:
            if source.words and await self.is_spoken(hint, source):
                return source.created_at
        return -math.inf

    async def last_said(self, hint: Hint, sources: Sequence[HintSource]) -> float:
        """When, according to the judge, a user's words last made the hint a rule, in unix seconds;
        -inf if none of the newest did. A source without words counts without being asked about.
        """
        asked: set[str] = set()
        for source in sources[:CHECKED]:
            if not source.words:
                return source.created_at
            if source.words in asked:
                continue
            asked.add(source.words)
            if await self.is_rule(hint, source):
                return source.created_at
        return -math.inf
