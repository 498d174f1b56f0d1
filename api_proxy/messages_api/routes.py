"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api_proxy.access.admission import Body, admitted, checked
from api_proxy.errors import ApiError
from api_proxy.messages_api import errors
from api_proxy.messages_api.reply import message_body
from api_proxy.messages_api.request import chat_body, ignored_fields
from api_proxy.messages_api.stream import MessageStream
from api_proxy.reply.formats import EndedReply, StreamWriter
from api_proxy.reply.responses import answer
from api_proxy.request.completion import Completion, completion_of
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

router = APIRouter()


class MessagesFormat:
    """The format of a reply."""

    def __init__(self, model: str) -> None:
        self._model = model

    def refusal(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        """Anthropic's error."""
        return errors.refusal(error)

    def whole(self, turn: Turn, ended: EndedReply) -> dict[str, Any]:
        """A message."""
        return message_body(turn.turn_id, self._model, ended)

    def writer(self, turn: Turn) -> StreamWriter:
        """The events of a stream."""
        return MessageStream(turn.turn_id, self._model, len(turn.rollout.prompt_ids))


async def messages(request: Request) -> Response:
    """Anthropic's messages; the answered turn is recorded."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, _scope: str) -> Completion:
        return await service.workers.run(body.num_bytes, _completion, request, body)

    turn = await admitted(request, parse)
    return answer(service, turn, MessagesFormat(turn.completion.fields.model))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> dict[str, int]:
    """Count the tokens of a prompt, which is neither sampled from nor recorded."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, _scope: str) -> Completion:
        return await service.workers.run(
            body.num_bytes, _completion, request, body, needs_budget=False
        )

    completion, _ = await checked(request, parse)
    return {"input_tokens": await service.count_prompt_tokens(completion)}


def _completion(request: Request, body: Body, *, needs_budget: bool = True) -> Completion:
    chat = chat_body(body.fields, needs_budget=needs_budget)
    completion = completion_of(chat, request.headers, body.limits)
    return replace(completion, ignored=ignored_fields(body.fields))
