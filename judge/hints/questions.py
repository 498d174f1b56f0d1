"""Questions to the judge about hints: m votes on each question, and the answer they give.

The answer is that of more than half of the votes that decide; None if there is no such majority, or
if the question does not fit into the judge's context. Once more than half of m agree, the others
are not asked for. Each vote writes one text. Independent of the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from openai import AsyncOpenAI

from judge.config import JudgeConfig
from judge.hints import prompts
from judge.hints.metrics import QuestionMetrics
from judge.votes.asking import ask
from judge.votes.context import (
    NO_CONTROL_TEXTS,
    CountTokens,
    JudgePrompt,
    Shown,
    estimate_tokens,
    fitted,
)
from judge.votes.parsing import last_decision
from judge.votes.voting import Ballot, IsDecided
from records.messages import Message
from records.types import TurnRecord, Vote
from rollout_bridge.rendering.control_text import ControlTexts

_WRITING_TEMPERATURE = 1.0
"""The lowest for writing: texts that are all the same teach only one exception."""

Answer = TypeVar("Answer")


class Relation(StrEnum):
    """How a hint relates to another one."""

    SAME = "same"
    OPPOSITE = "opposite"
    UNRELATED = "unrelated"


_RELATIONS = {1: Relation.SAME, -1: Relation.OPPOSITE, 0: Relation.UNRELATED}


class HintQuestions:
    """Asks the judge behind `client`. All methods raise JudgeUnavailable when no vote got an
    answer. `count_tokens` and `control_texts` belong to the judge's tokenizer, as for votes on
    turns. `on_answer` is called after each question.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        config: JudgeConfig,
        *,
        count_tokens: CountTokens = estimate_tokens,
        control_texts: ControlTexts = NO_CONTROL_TEXTS,
        metrics: QuestionMetrics | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        self._on_answer = on_answer
        self._client, self._config = client, config
        self._count_tokens, self._control_texts = count_tokens, control_texts
        self.metrics = metrics if metrics is not None else QuestionMetrics()

    async def relation(self, first: str, second: str) -> Relation | None:
        """How two hints relate to each other."""
        messages = prompts.relation_messages(first, second)
        return await self._decided("relation", _short(messages), [], _relation)

    async def is_rule(self, hint: str, words: str) -> bool | None:
        """Whether a hint says how answers should always be; `words` led to it."""
        return await self._decided("rule", _short(prompts.rule_messages(hint, words)), [], _yes)

    async def applies(self, hint_text: str, turn: TurnRecord) -> bool | None:
        """Whether a hint is about what a recorded turn answers."""

        def shown(part: Sequence[Message], omitted_after: int, num_omitted: int):
            return prompts.applies_messages(part, turn.tools, hint_text, omitted_after, num_omitted)

        return await self._decided("applies", shown, turn.messages, _yes, turn.session_id)

    async def followed(
        self,
        words: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        response: Message,
    ) -> bool | None:
        """Whether a response to `messages` does what `words` ask."""

        def shown(part: Sequence[Message], omitted_after: int, num_omitted: int):
            return prompts.followed_messages(
                part, tools, response, words, omitted_after, num_omitted
            )

        return await self._decided("followed", shown, messages, _yes)

    async def opposites(self, hint: str, words: str) -> list[str]:
        """Open wishes for the opposite; `words` show how users speak here."""
        count = self._config.exception_texts
        return await self._written("opposite", prompts.opposite_messages(hint, words), count)

    async def outsides(self, hint: str, tools: Sequence[dict[str, Any]]) -> list[str]:
        """Wishes about which the hint says nothing."""
        count = max(self._config.exception_texts // 3, 1)
        return await self._written("outside", prompts.outside_messages(hint, tools), count)

    async def _decided(
        self,
        name: str,
        shown: Shown,
        messages: Sequence[Message],
        read: Callable[[Vote], Answer | None],
        routing_key: str | None = None,
    ) -> Answer | None:
        def agree(votes: Sequence[Vote]) -> bool:
            return len({read(vote) for vote in votes}) == 1 and read(votes[0]) is not None

        ballot = await self._ballot(shown, messages, self._config, routing_key, agree)
        answer = None if ballot is None else majority([read(vote) for vote in ballot.votes])
        self.metrics.count(name, ballot, answer)
        return answer

    async def _written(self, name: str, messages: list[dict[str, str]], count: int) -> list[str]:
        """What `count` votes wrote, each text once, in their order."""
        config = self._config.model_copy(
            update={
                "votes": count,
                "temperature": max(self._config.temperature, _WRITING_TEMPERATURE),
            }
        )
        ballot = await self._ballot(_short(messages), [], config, None)
        texts = [] if ballot is None else [vote.hint.strip() for vote in ballot.votes]
        different = {" ".join(text.casefold().split()): text for text in reversed(texts) if text}
        found = list(reversed(different.values()))
        self.metrics.count(name, ballot, bool(found) or None)
        return found

    async def _ballot(
        self,
        shown: Shown,
        messages: Sequence[Message],
        config: JudgeConfig,
        routing_key: str | None,
        is_decided: IsDecided | None = None,
    ) -> Ballot | None:
        """The votes on one question; None if it does not fit."""

        def fit(max_tokens: int) -> JudgePrompt:
            return fitted(shown, messages, max_tokens, self._count_tokens, self._control_texts)

        asked = await ask(self._client, config, fit, self._count_tokens, routing_key, is_decided)
        if self._on_answer is not None:
            self._on_answer()
        return asked.ballot if asked.too_long is None else None


def majority(answers: Sequence[Answer | None]) -> Answer | None:
    """The answer of more than half of the votes that decide; None: no such majority, or all
    abstain.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    for answer, number in counts.most_common(1):
        if 2 * number > counts.total():
            return answer
    return None


def _short(messages: list[dict[str, str]]) -> Shown:
    """A question without a conversation that could be shortened."""
    return lambda _messages, _omitted_after, _num_omitted: messages


def _yes(vote: Vote) -> bool | None:
    return None if vote.score is None else vote.score == 1


def _relation(vote: Vote) -> Relation | None:
    decision = last_decision(vote.text)
    return None if decision is None else _RELATIONS.get(decision)
