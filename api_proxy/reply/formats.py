"""How a reply is formatted: the seam between answering a turn and the API that asked for it.

`responses` samples, records and sends; a `Format` decides what is sent, one for each API of this
endpoint. The one of chat completions is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from api_proxy.errors import ApiError
from api_proxy.reply import wire
from api_proxy.reply.reply import Delta, Reply
from api_proxy.turn import Turn

Logprobs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedReply:
    """A reply at its end: `reason` is why sampling ended ("stop" or "length"), `matched_stop` the
    stop string that ended it. `logprobs` are entries of tokens that no delta listed; None if they
    were not asked for.
    """

    reply: Reply
    reason: str
    matched_stop: str | None
    usage: wire.Usage
    num_reasoning_tokens: int
    logprobs: Logprobs | None


def num_reasoning_tokens(ids: Sequence[int], reasoning: str | None, end_id: int | None) -> int:
    """How many of a reply's ids are its reasoning: those up to the id that ends it.

    Without that id the reply was cut while it reasoned, if the family has such an id at all; for
    families that have none it is 0.
    """
    if not reasoning or end_id is None:
        return 0
    return ids.index(end_id) + 1 if end_id in ids else len(ids)


class StreamWriter(Protocol):
    """The events of one streamed reply, as bytes to send."""

    @property
    def keep_alive(self) -> bytes: ...
    def start(self) -> bytes: ...
    def delta(self, delta: Delta, logprobs: Logprobs | None = None) -> bytes: ...
    def end(self, ended: EndedReply) -> bytes: ...
    def error(self, error: ApiError) -> bytes: ...


class Format(Protocol):
    """The format of one API. `refusal` gives HTTP status and body of an error."""

    def refusal(self, error: ApiError) -> tuple[int, dict[str, Any]]: ...
    def whole(self, turn: Turn, ended: EndedReply) -> dict[str, Any]: ...
    def writer(self, turn: Turn) -> StreamWriter: ...


class ChoiceWriter(StreamWriter, Protocol):
    """The events of one of several replies in a stream."""

    def choice_end(self, ended: EndedReply) -> bytes: ...
    def close(self, usage: wire.Usage) -> bytes: ...


class ChoicesFormat(Format, Protocol):
    """The format of an API that gives several replies to one request."""

    def whole_choices(self, turn: Turn, ended: Sequence[EndedReply]) -> dict[str, Any]: ...
    def choice_writer(self, turn: Turn, one: Turn) -> ChoiceWriter: ...


class ChatFormat:
    """OpenAI's chat completions."""

    def __init__(self, model: str) -> None:
        self._model = model

    def refusal(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        """OpenAI's error."""
        return error.status, error.body()

    def whole(self, turn: Turn, ended: EndedReply) -> dict[str, Any]:
        """A `chat.completion`."""
        return self.whole_choices(turn, [ended])

    def whole_choices(self, turn: Turn, ended: Sequence[EndedReply]) -> dict[str, Any]:
        """A `chat.completion` with a choice for each of the turn and its siblings."""
        choices = []
        for index, (one, end) in enumerate(zip((turn, *turn.siblings), ended, strict=True)):
            reason = wire.finish_reason(end.reason, end.reply)
            choice = wire.choice_body(index, end.reply, reason, end.logprobs)
            choices.append({**choice, "turn_id": one.turn_id} if turn.siblings else choice)
        usage = wire.summed([end.usage for end in ended])
        return wire.completion_body(self._head(turn), choices, usage)

    def writer(self, turn: Turn) -> ChatStream:
        """The chunks of a stream."""
        return self.choice_writer(turn, turn)

    def choice_writer(self, turn: Turn, one: Turn) -> ChatStream:
        """The chunks of one choice in the stream that answers `turn`."""
        include_usage = turn.completion.include_usage
        return ChatStream(wire.ChunkWriter(self._head(turn), include_usage, one.choice))

    def _head(self, turn: Turn) -> wire.ReplyHead:
        return wire.ReplyHead(turn_id=turn.turn_id, model=self._model, created=int(turn.created))


class ChatStream:
    """Chunks in their order."""

    keep_alive = wire.KEEP_ALIVE

    def __init__(self, chunks: wire.ChunkWriter) -> None:
        self._chunks = chunks

    def start(self) -> bytes:
        return self._chunks.role()

    def delta(self, delta: Delta, logprobs: Logprobs | None = None) -> bytes:
        return self._chunks.delta(delta, logprobs)

    def end(self, ended: EndedReply) -> bytes:
        return self.choice_end(ended) + self.close(ended.usage)

    def choice_end(self, ended: EndedReply) -> bytes:
        """The last chunk of the choice."""
        return self._chunks.finish(wire.finish_reason(ended.reason, ended.reply), ended.logprobs)

    def close(self, usage: wire.Usage) -> bytes:
        """What follows the last choice."""
        return self._chunks.usage(usage) + wire.DONE

    def error(self, error: ApiError) -> bytes:
        return wire.error_event(error)
