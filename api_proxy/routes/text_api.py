"""`/v1/completions`: a text is continued.

It has no conversation: no message whose answer a later request could comment on, so nothing can be
learned in hindsight. The turn is recorded with its exact ids, as a type of its own that never
trains (`text_completion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api_proxy.access.admission import Body, admitted
from api_proxy.access.request_limits import RequestLimits
from api_proxy.errors import ApiError, invalid, unsupported
from api_proxy.reply import wire
from api_proxy.reply.choices import answer_all
from api_proxy.reply.formats import EndedReply, Logprobs
from api_proxy.reply.reply import TEXT_ROLE, Delta
from api_proxy.request.completion import Completion, completion_of
from api_proxy.request.fields import SAMPLING, check_fields
from api_proxy.turn import Turn
from api_proxy.turns import TurnService
from records.names import TurnType
from rollout_bridge.rendering.rendering import Rendering

_DEFAULT_TOKENS = 16
_SAME_FIELDS = (
    *("model", "stream", "stream_options", "n", "stop", "temperature", "top_p", "user"),
    *("safety_identifier", "session_id", "session_done", *SAMPLING),
)


class TextRequest(BaseModel):
    """The fields that differ from those of chat completions."""

    model_config = ConfigDict(extra="ignore")

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


async def completions(request: Request) -> Response:
    """OpenAI's completions; the answered turn is recorded and never trains."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, _scope: str) -> Completion:
        rendering = service.deps.rendering
        return await service.workers.run(
            body.num_bytes, parse_text, body.fields, request.headers, body.limits, rendering
        )

    turn = await admitted(request, parse)
    return answer_all(service, turn, TextFormat(turn.completion.fields.model))


def parse_text(
    body: dict[str, Any], headers: Any, limits: RequestLimits, rendering: Rendering
) -> Completion:
    """The request in `body`. Raises ApiError 400 on anything that cannot be served."""
    try:
        fields = TextRequest.model_validate(body)
    except ValidationError as error:
        param = str(error.errors()[0]["loc"][0])
        raise invalid(f"Invalid value for '{param}'.", param) from None
    ignored = check_fields(body, (*_SAME_FIELDS, *TextRequest.model_fields))
    text, ids = _prompt(fields.prompt, rendering, limits)
    chat = {name: body[name] for name in _SAME_FIELDS if name in body}
    chat["messages"] = [{"role": "user", "content": text}]
    chat["max_tokens"] = fields.max_tokens or _DEFAULT_TOKENS
    if fields.logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": fields.logprobs}
    completion = completion_of(chat, headers, limits)
    return replace(
        completion,
        messages=[{"role": TEXT_ROLE, "content": text}],
        turn_type=TurnType.TEXT,
        prompt_ids=ids,
        ignored=ignored,
    )


def _prompt(
    prompt: Any, rendering: Rendering, limits: RequestLimits
) -> tuple[str, tuple[int, ...]]:
    """The one prompt as text and as ids."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise unsupported("Only one prompt per request is supported.", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        limits.check_prompt([{"content": prompt}], [])
    ids = rendering.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise invalid("'prompt' is empty.", "prompt")
    if not all(0 <= token < rendering.vocab_size for token in ids):
        raise invalid(f"'prompt' has ids outside [0, {rendering.vocab_size}).", "prompt")
    text = prompt if isinstance(prompt, str) else rendering.decode(ids)
    return text, tuple(ids)


class TextFormat:
    """OpenAI's text completions."""

    def __init__(self, model: str) -> None:
        self._model = model

    def refusal(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        """OpenAI's error."""
        return error.status, error.body()

    def whole(self, turn: Turn, ended: EndedReply) -> dict[str, Any]:
        """A `text_completion`."""
        return self.whole_choices(turn, [ended])

    def whole_choices(self, turn: Turn, ended: Sequence[EndedReply]) -> dict[str, Any]:
        """A `text_completion` with a choice for each of the turn and its siblings."""
        choices = [
            _choice(index, end.reply.content, end.logprobs, end.reason)
            for index, end in enumerate(ended)
        ]
        usage = wire.summed([end.usage for end in ended])
        return {**self._head(turn), "choices": choices, "usage": usage.body()}

    def writer(self, turn: Turn) -> TextStream:
        """The chunks of a stream."""
        return self.choice_writer(turn, turn)

    def choice_writer(self, turn: Turn, one: Turn) -> TextStream:
        """The chunks of one choice in the stream that answers `turn`."""
        return TextStream(self._head(turn), one.choice, turn.completion.include_usage)

    def _head(self, turn: Turn) -> dict[str, Any]:
        return {
            "id": f"cmpl-{turn.turn_id}",
            "object": "text_completion",
            "created": int(turn.created),
            "model": self._model,
        }


class TextStream:
    """Chunks of one choice in their order."""

    keep_alive = wire.KEEP_ALIVE

    def __init__(self, head: dict[str, Any], choice: int, include_usage: bool) -> None:
        self._head = head
        self._choice = choice
        self._include_usage = include_usage

    def start(self) -> bytes:
        return b""

    def delta(self, delta: Delta, logprobs: Logprobs | None = None) -> bytes:
        return self._chunk(delta.content, logprobs, None)

    def end(self, ended: EndedReply) -> bytes:
        return self.choice_end(ended) + self.close(ended.usage)

    def choice_end(self, ended: EndedReply) -> bytes:
        """The last chunk of the choice."""
        return self._chunk("", ended.logprobs, ended.reason)

    def close(self, usage: wire.Usage) -> bytes:
        """What follows the last choice."""
        if not self._include_usage:
            return wire.DONE
        return _sse({**self._head, "choices": [], "usage": usage.body()}) + wire.DONE

    def error(self, error: ApiError) -> bytes:
        return wire.error_event(error)

    def _chunk(self, text: str, logprobs: Logprobs | None, reason: str | None) -> bytes:
        return _sse({**self._head, "choices": [_choice(self._choice, text, logprobs, reason)]})


def _choice(index: int, text: str, entries: Logprobs | None, reason: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(entries) if entries else None,
        "finish_reason": reason,
    }


def _logprobs(entries: Logprobs) -> dict[str, Any]:
    """The older shape of log-probs: parallel lists."""
    tops = [
        {top["token"]: top["logprob"] for top in entry["top_logprobs"]} or None for entry in entries
    ]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": tops if any(tops) else None,
    }


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
