"""Answers of a model that returns only text, to prompts whose own answer needed correction.

Such a model cannot score the policy's tokens, so it is no teacher; its answers, given with the hint
in view, can be trained on elsewhere by imitation. Here it is the run's judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from openai import AsyncOpenAI
from sqlalchemy import Connection

from judge.config import JudgeConfig
from judge.votes.calls import JudgeCall, JudgeCallError
from opd.export.choice import LeftOut, why_not_taught
from opd.export.dataset import DatasetFolder, sft_row, wholes
from opd.export.messages import NotText, plain_messages
from opd.export.rows import Row
from records.messages import Message
from records.reading.exporting import SessionHeader, places
from records.reading.whole_turns import WholeTurn
from records.types import TurnRecord
from rollout_bridge.scoring.hinting import hinted_messages

Ask = Callable[[Sequence[Message]], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A turn and the hint that its answer needed."""

    turn: TurnRecord
    hint: str


def lesson_of(whole: WholeTurn) -> Lesson | LeftOut:
    """What to ask for a turn, or why not."""
    reason = why_not_taught(whole)
    if reason is not None:
        return reason
    assert whole.verdict is not None
    assert whole.verdict.hint is not None
    return Lesson(turn=whole.turn, hint=whole.verdict.hint)


def asking(client: AsyncOpenAI, config: JudgeConfig) -> Ask:
    """Asks the judge for an answer in text; "" if it was cut. Raises JudgeCallError."""
    limit = asyncio.Semaphore(config.loop.concurrency)

    async def ask(messages: Sequence[Message]) -> str:
        async with limit:
            call = JudgeCall(
                client=client, messages=cast("list[dict[str, str]]", messages), config=config
            )
            reply = await call.reply()
        # An example that is cut would teach to stop early.
        return "" if reply.is_cut else reply.text.strip()

    return ask


class Taught:
    """The answers for one session after the other, written to `rows`."""

    def __init__(self, rows: DatasetFolder, ask: Ask) -> None:
        self._rows, self._ask = rows, ask
        self._lessons: list[Lesson] = []

    def read_session(self, connection: Connection, session: SessionHeader) -> None:
        """Note what to ask of a session; see `answer`."""
        names = [place.turn_id for place in places(connection, session.session_id)]
        for whole in wholes(connection, names):
            lesson = lesson_of(whole)
            if isinstance(lesson, LeftOut):
                self._rows.add(lesson)
            else:
                self._lessons.append(lesson)

    async def answer(self) -> None:
        """Ask for what was noted, and write it."""
        lessons, self._lessons = self._lessons, []
        for row in await asyncio.gather(*(taught_row(one, self._ask) for one in lessons)):
            self._rows.add(row)


async def taught_row(lesson: Lesson, ask: Ask) -> Row | LeftOut:
    """The conversation, without the hint, and the answer that was given with it in view."""
    turn = lesson.turn
    try:
        asked = plain_messages(hinted_messages(turn.messages, lesson.hint))
    except NotText:
        return LeftOut.NOT_TEXT
    try:
        answer = await ask(asked)
    except JudgeCallError:
        return LeftOut.NOT_ANSWERED
    if not answer:
        return LeftOut.NOT_ANSWERED
    response: dict[str, Any] = {"role": "assistant", "content": answer}
    return sft_row(replace(turn, response=response))
