"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api_proxy.access.admission import Body, admitted, checked
from api_proxy.access.callers import caller_of
from api_proxy.errors import ApiError, invalid, unsupported
from api_proxy.reply.formats import EndedReply, StreamWriter
from api_proxy.reply.responses import answer
from api_proxy.request.completion import Completion, completion_of
from api_proxy.responses_api import stored
from api_proxy.responses_api.items import reply_items
from api_proxy.responses_api.reply import Head, page_of, status_of, usage_body
from api_proxy.responses_api.request import chat_body, echo_of, ignored_fields, parsed
from api_proxy.responses_api.stream import ResponseStream
from api_proxy.turn import Turn
from api_proxy.turns import TurnService

router = APIRouter()

_OTHER_BYTES = 65_536
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a field of chat completions is called here."""


class ResponsesFormat:
    """The format of a reply."""

    def __init__(self, model: str) -> None:
        self._model = model

    def refusal(self, error: ApiError) -> tuple[int, dict[str, Any]]:
        """OpenAI's error."""
        return refusal(error)

    def whole(self, turn: Turn, ended: EndedReply) -> dict[str, Any]:
        """A `response`."""
        status = status_of(ended.reason)
        head = self._head(turn)
        output = reply_items(turn.turn_id, ended.reply.message(), status, head.namespaces)
        _list_logprobs(output, ended.logprobs)
        usage = usage_body(ended.usage, ended.num_reasoning_tokens)
        return head.body(status, output, usage)

    def writer(self, turn: Turn) -> StreamWriter:
        """The events of a stream."""
        return ResponseStream(self._head(turn))

    def _head(self, turn: Turn) -> Head:
        completion = turn.completion
        echo = completion.request_echo
        assert echo is not None
        first = completion.messages[0]
        return Head(
            turn_id=turn.turn_id,
            model=self._model,
            instructions=first["content"] if echo["has_instructions"] else None,
            tools=completion.tools,
            echo=echo,
        )


def refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    """OpenAI's error, with the fields' names in this API."""
    body = error.body()
    param = error.param or ""
    for name, own in _PARAMS.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            body["error"]["param"] = own + param.removeprefix(name)
    return error.status, body


def _list_logprobs(output: list[dict[str, Any]], logprobs: list[dict[str, Any]] | None) -> None:
    """Put log-probs with the text that they belong to."""
    for item in output:
        if item["type"] == "message" and logprobs:
            item["content"][0]["logprobs"] = logprobs


async def responses(request: Request) -> Response:
    """OpenAI's responses; the answered turn is recorded."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, scope: str) -> Completion:
        return await _completion(request, body, scope)

    turn = await admitted(request, parse)
    return answer(service, turn, ResponsesFormat(turn.completion.fields.model))


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> dict[str, Any]:
    """Count the tokens of a prompt, which is neither sampled from nor recorded."""
    service: TurnService = request.app.state.service

    async def parse(body: Body, scope: str) -> Completion:
        return await _completion(request, body, scope)

    completion, _ = await checked(request, parse)
    count = await service.count_prompt_tokens(completion)
    return {"object": "response.input_tokens", "input_tokens": count}


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A response that was sent earlier."""
    service: TurnService = request.app.state.service
    if request.query_params.get("stream", "false").lower() == "true":
        raise unsupported("A response that was sent cannot be streamed again.", "stream")
    found = await stored.response_of(service, caller_of(request).scope, response_id)
    return found.body(service.config.model_name, service.deps.rendering.reasoning_end_id)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Make a response unreadable; its turn stays recorded."""
    await stored.delete(request.app.state.service, caller_of(request).scope, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> dict[str, Any]:
    """What a response answered."""
    found = await stored.response_of(
        request.app.state.service, caller_of(request).scope, response_id
    )
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise invalid("'limit' must be an integer from 1 to 100.", "limit")
    if order not in ("asc", "desc"):
        raise invalid("'order' must be 'asc' or 'desc'.", "order")
    page = page_of(found.input_items(), int(limit), order, after)
    if page is None:
        raise invalid("'after' names no item of this response.", "after")
    return page


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> dict[str, Any]:
    """Refused: there are no responses in the background."""
    await stored.response_of(request.app.state.service, caller_of(request).scope, response_id)
    raise unsupported("Only background responses can be cancelled.", "background")


def _most_echoed(service: TurnService) -> int:
    """The longest allowed schema, and the short fields."""
    return service.config.max_schema_bytes + _OTHER_BYTES


async def _completion(request: Request, body: Body, scope: str) -> Completion:
    service: TurnService = request.app.state.service
    fields = body.fields
    if "input" in fields:
        fields["input"] = await stored.with_references(service, scope, fields["input"])
    asked = await service.workers.run(body.num_bytes, parsed, fields)
    previous, num_bytes = None, body.num_bytes
    if asked.previous_response_id is not None:
        found = await stored.response_of(service, scope, asked.previous_response_id)
        previous = found.previous()
        num_bytes += found.num_tokens * service.config.max_bytes_per_token

    def completion() -> Completion:
        chat = chat_body(fields, asked, previous)
        return replace(
            completion_of(chat, request.headers, body.limits),
            request_echo=echo_of(fields, asked, service.deps.clock(), _most_echoed(service)),
            ignored=ignored_fields(fields),
            is_retrievable=asked.store is not False,
            parent_turn_id=previous.turn_id if previous else None,
        )

    return await service.workers.run(num_bytes, completion)
