"""Writes a hint's texts: open wishes for its opposite, and wishes that it says nothing about.

What the judge writes is shown to the policy, so each text is checked first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol
from uuid import uuid4

from judge.config import JudgeConfig
from judge.hints.questions import HintQuestions, Relation
from judge.votes.screening import Evidence, rejection
from records.hints.texts import split_wishes
from records.hints.types import Hint, HintPrompt, HintSource, PromptKind
from records.messages import Message
from records.names import DropReason
from records.types import TurnRecord

_NO_EVIDENCE = Evidence(next_words=(), new_values=frozenset())
_WANTED_WISHES = 8
"""With fewer open wishes for the opposite, the judge writes more: the policy learns so few by
heart.
"""
_WRITING_ROUNDS = 3


class WriterStore(Protocol):
    """What writing needs from the store."""

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]: ...
    async def redacted_messages(self, messages: Sequence[Message]) -> list[Message]: ...


class TextWriter:
    """Has the judge write texts, and keeps those that may be used."""

    def __init__(self, store: WriterStore, questions: HintQuestions, config: JudgeConfig) -> None:
        self._store, self._questions, self._config = store, questions, config

    async def texts(
        self, hint: Hint, sources: Sequence[HintSource], known: Sequence[HintPrompt]
    ) -> tuple[HintPrompt, ...]:
        """New texts in addition to the `known` ones. Each round of writing reads another user's
        words.
        """
        said = [source.words for source in sources if source.words] or [""]
        have = {one.text for one in known}
        wishes: dict[str, None] = {}
        for number in range(_WRITING_ROUNDS):
            written = await self._questions.opposites(hint.text, said[number % len(said)])
            new = [text for text in written if text not in wishes and text not in have]
            wishes |= dict.fromkeys(await self._usable(hint, Relation.OPPOSITE, new))
            if len(wishes) >= _WANTED_WISHES:
                break
        others = [] if known else await self._outsides(hint, sources)
        return (
            *(
                _prompt(hint, PromptKind.OPPOSITE, text, held_out=held_out)
                for text, held_out in split_wishes(hint.text, list(wishes))
            ),
            *(_prompt(hint, PromptKind.OUTSIDE, text, held_out=False) for text in others),
        )

    async def _outsides(self, hint: Hint, sources: Sequence[HintSource]) -> list[str]:
        turns = await self._store.load_turns([source.turn_id for source in sources[:1]])
        tools = turns[0].tools if turns else []
        written = await self._questions.outsides(hint.text, tools)
        return await self._usable(hint, Relation.UNRELATED, written)

    async def _usable(self, hint: Hint, wanted: Relation, texts: Sequence[str]) -> list[str]:
        """The texts that may be shown to a policy: short, without control texts, instructions to
        the pipeline, or anything that must not be stored, and, according to the judge, what was
        asked for.
        """
        at_once = asyncio.Semaphore(self._config.loop.concurrency)

        async def refused(text: str) -> str | None:
            async with at_once:
                return await self._why_refused(hint, wanted, text)

        reasons = await asyncio.gather(*(refused(text) for text in texts))
        for reason in reasons:
            if reason is not None:
                self._questions.metrics.refused_texts.labels(reason=reason).inc()
        return [text for text, reason in zip(texts, reasons, strict=True) if reason is None]

    async def _why_refused(self, hint: Hint, wanted: Relation, text: str) -> str | None:
        refused = rejection(text, _NO_EVIDENCE, self._config)
        if refused is not None:
            return refused.value
        message = {"role": "user", "content": text}
        [clean] = await self._store.redacted_messages([message])
        if clean is not message:
            return DropReason.SENSITIVE.value
        relation = await self._questions.relation(hint.text, text)
        return None if relation is wanted else f"not_{wanted.value}"


def _prompt(hint: Hint, kind: PromptKind, text: str, *, held_out: bool) -> HintPrompt:
    return HintPrompt(
        prompt_id=uuid4().hex,
        hint_id=hint.hint_id,
        kind=kind,
        text=text,
        held_out=held_out,
        asked=0,
        followed=0,
        dropped=None,
    )
