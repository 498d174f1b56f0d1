"""Several answers to one request (`n`): each is a turn of its own, sampled alongside the others.

They share the prompt and nothing else. The one with which the conversation continues is found by
what the client echoes; the others never get a next state. If one fails, all do: a client that asked
for n answers would not expect fewer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Send

from api_proxy.reply import wire
from api_proxy.reply.formats import ChoicesFormat, ChoiceWriter, EndedReply
from api_proxy.reply.responses import StreamResponse, TurnResponse, WholeResponse, answer
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

_PATIENCE_S = 0.7


def answer_all(service: TurnService, turn: Turn, wording: ChoicesFormat) -> TurnResponse:
    """The response to a prepared turn and its siblings, streamed if the client asked for that."""
    if not turn.siblings:
        return answer(service, turn, wording)
    kind = StreamChoices if turn.completion.fields.stream else WholeChoices
    return kind(service, turn, wording)


class WholeChoices(WholeResponse):
    """All choices in one piece."""

    wording: ChoicesFormat

    async def answer(self, send: Send) -> None:
        ended = await together(self, [self.sampled(turn) for turn in self.turns])
        if ended is not None:
            await self.send_reply(send, self.wording.whole_choices(self.turn, ended))


class StreamChoices(StreamResponse):
    """All choices in one stream, each chunk with the index of its choice."""

    wording: ChoicesFormat

    async def _stream(self, send: Send) -> None:
        writers = [self.wording.choice_writer(self.turn, one) for one in self.turns]
        works = [
            self._choice(turn, writer, send)
            for turn, writer in zip(self.turns, writers, strict=True)
        ]
        ended = await together(self, works)
        if ended is not None:
            usage = wire.summed([end.usage for end in ended])
            await self._send(send, writers[0].close(usage), is_last=True)

    async def _choice(self, turn: Turn, writer: ChoiceWriter, send: Send) -> EndedReply | None:
        ended = await self.streamed(turn, writer, send)
        if ended is not None:
            await self._send(send, writer.choice_end(ended))
        return ended


async def together(
    response: TurnResponse, works: Sequence[Coroutine[Any, Any, EndedReply | None]]
) -> list[EndedReply] | None:
    """The ends of all choices; None if the client left. Raises what the first to fail raised.

    The others are then aborted, and recorded as far as they got.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in done if task.exception() is not None), None)
        if pending:
            await response.break_off()
            await asyncio.wait(pending, timeout=_PATIENCE_S)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed is not None:
        for turn in response.turns:
            if turn.rollout.ids:
                await response.record_rest(turn)
        raise failed.exception() or AssertionError("unreachable")
    ends = [task.result() for task in tasks]
    return None if None in ends else [end for end in ends if end is not None]
