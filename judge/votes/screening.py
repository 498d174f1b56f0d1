"""Which hints are refused although the vote for them counts.

Whoever writes the next state writes part of what the judge reads, and a hint trains the policy. So
a hint must be a short instruction about the response: not a copy of what came after it, not a value
that only the future knows, not text that addresses the judge, the trainer or a chat template. Each
refusal has one reason of a closed set. Pure; independent of HTTP and the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from judge.config import JudgeConfig
from judge.votes.fencing import has_marker
from judge.votes.prompts import message_text
from records.messages import Message
from records.names import HintRejection
from records.types import TurnRecord, Vote

# Scripts without blanks between words: each character counts as a word.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MIN_VALUE_CHARS = 4
_PUNCTUATION = "\"'`.,;:!?()[]{}<>"

_HINT_HEADER = re.compile(r"\[\s*user'?s\s+hint", re.IGNORECASE)
_RULES = (
    r"(?:instructions?|rules?|prompts?|guidelines?|(?:system|previous|earlier|prior)\s+messages?)"
)
_NOT_NEGATED = r"(?<!not\s)(?<!n't\s)(?<!never\s)(?<!don’t\s)"
_PIPELINE = (
    r"(?:judges?|graders?|evaluators?|reviewers?|voters?|trainers?|teacher\s+models?"
    r"|reward\s+models?|training\s+(?:loop|run|pipeline|process|step))"
)
_INSTRUCTS = re.compile(
    "|".join(
        (
            rf"{_NOT_NEGATED}\b(?:ignore|disregard|forget|override|bypass)\b[^.\n]{{0,60}}\b{_RULES}\b",
            rf"{_NOT_NEGATED}\b(?:ignore|disregard|forget)\b[^.\n]{{0,20}}"
            r"\b(?:above|before|previous\w*|prior)\b",
            r"\b(?:reveal|print|repeat|show|leak|output|send)\b[^.\n]{0,40}"
            r"\b(?:system|developer|hidden|secret)\s+(?:prompt|message|instructions?)\b",
            rf"\b(?:this\s+is|note\s+to|message\s+(?:for|to)|dear|attention)\b[^.\n]{{0,20}}"
            rf"\b(?:the\s+)?{_PIPELINE}\b",
            rf"\b(?:the|all|any|you)\s+{_PIPELINE}\s+(?:must|should|shall|will|has\s+to|have\s+to)\b",
            rf"\b(?:tell|instruct|trick|convince|make|force)\s+(?:the|all)\s+{_PIPELINE}\b",
            r"\b(?:vote|votes|voting)\s+(?:\+?1|-1|yes|no|positive\w*|negative\w*)\b",
            r"\b(?:give|assign|award|set|increase|maximi[sz]e)\b[^.\n]{0,30}"
            r"\b(?:reward|advantage|positive\s+vote|vote|log-?prob\w*|learning\s+rate)s?\b",
            r"\b(?:you\s+are\s+now|from\s+now\s+on\s*,?\s*you\s+are)\s+(?:an?|the|in|no)\b",
        )
    ),
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a hint is compared with: the words of each message of the next state, and the values
    that occur there and nowhere before.
    """

    next_words: tuple[tuple[str, ...], ...]
    new_values: frozenset[str]

    @classmethod
    def of_turn(cls, turn: TurnRecord) -> Evidence:
        """The evidence of a stored turn."""
        before = [*turn.messages, turn.response]
        return cls.of(before, turn.tools, turn.next_state)

    @classmethod
    def of(
        cls,
        before: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        next_state: Sequence[Message],
    ) -> Evidence:
        """`before` is the conversation up to and including the response."""
        after = [message_text(message) for message in next_state]
        known = values_in([*map(message_text, before), *map(str, tools)])
        return cls(
            next_words=tuple(tuple(words(text)) for text in after),
            new_values=frozenset(values_in(after) - known),
        )


def words(text: str) -> list[str]:
    """Case-folded words; each character of a script without blanks is one."""
    return _WORD.findall(text.casefold())


def values_in(texts: Iterable[str]) -> set[str]:
    """What cannot be known before it is seen, case-folded: words with a digit that have at least
    four characters, and web and mail addresses.
    """
    found: set[str] = set()
    for text in texts:
        folded = text.casefold()
        found.update(
            word
            for word in _WORD.findall(folded)
            if len(word) >= _MIN_VALUE_CHARS and any(map(str.isdigit, word))
        )
        found.update(
            token.strip(_PUNCTUATION)
            for token in folded.split()
            if "://" in token or "@" in token.strip(_PUNCTUATION + "@")
        )
    return found


def copies_run(hint: str, evidence: Evidence, max_words: int) -> bool:
    """Whether more than `max_words` words in a row occur both in the hint and in one message of the
    next state.
    """
    size = max_words + 1
    mine = set(_runs(words(hint), size))
    return any(run in mine for theirs in evidence.next_words for run in _runs(theirs, size))


def _runs(texts: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(texts[start : start + size]) for start in range(len(texts) - size + 1))


def _is_too_long(hint: str, _: Evidence, config: JudgeConfig) -> bool:
    return len(hint) > config.max_hint_chars


def _is_control_text(hint: str, _: Evidence, __: JudgeConfig) -> bool:
    return has_marker(hint) or _HINT_HEADER.search(hint) is not None


def _instructs(hint: str, _: Evidence, __: JudgeConfig) -> bool:
    return _INSTRUCTS.search(hint) is not None


def _copies(hint: str, evidence: Evidence, config: JudgeConfig) -> bool:
    return copies_run(hint, evidence, config.max_copied_words)


def _names_new_value(hint: str, evidence: Evidence, config: JudgeConfig) -> bool:
    return not config.allow_new_values and bool(values_in([hint]) & evidence.new_values)


_TESTS: tuple[tuple[HintRejection, Callable[[str, Evidence, JudgeConfig], bool]], ...] = (
    (HintRejection.TOO_LONG, _is_too_long),
    (HintRejection.CONTROL_TEXT, _is_control_text),
    (HintRejection.INSTRUCTS_PIPELINE, _instructs),
    (HintRejection.COPIES_NEXT_STATE, _copies),
    (HintRejection.NEW_VALUE, _names_new_value),
)


def rejection(hint: str, evidence: Evidence, config: JudgeConfig) -> HintRejection | None:
    """Why a hint is refused; the first reason that holds, None if it may be used."""
    hint = hint.strip()
    return next((reason for reason, holds in _TESTS if holds(hint, evidence, config)), None)


def screened(votes: Sequence[Vote], evidence: Evidence, config: JudgeConfig) -> tuple[Vote, ...]:
    """The votes; those whose hint is refused get the reason. Their scores stay."""
    return tuple(
        replace(vote, rejected=rejection(vote.hint, evidence, config))
        if vote.score == 1 and vote.hint
        else vote
        for vote in votes
    )
