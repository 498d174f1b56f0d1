"""Responses that were sent earlier, read back from the store: none of them is kept in memory.

A response can be read again by the key that asked for it, unless it sent `store: false` or deleted
it. That does not affect the turn itself, which is recorded and trained on like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_proxy.errors import ApiError, beyond, store_unavailable
from api_proxy.reply.formats import num_reasoning_tokens
from api_proxy.reply.wire import Usage
from api_proxy.responses_api.items import Body, input_items, reply_items, turn_of_item
from api_proxy.responses_api.reply import Head, status_of, usage_body
from api_proxy.responses_api.request import Previous
from api_proxy.responses_api.tools import Namespaces
from api_proxy.turns import TurnService
from records.errors import StoreError
from records.types import TurnRecord

_MAX_REFERRED = 128
"""Responses that the references of one request may lead to: each is read with its whole history."""
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A recorded turn and what is kept of its request (`request.echo_of`)."""

    turn: TurnRecord
    echo: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.turn.prompt_ids) + len(self.turn.response_ids)

    @property
    def num_instructions(self) -> int:
        """Messages at the beginning of the prompt that are the instructions: one or none."""
        return int(self.echo["has_instructions"])

    @property
    def _namespaces(self) -> Namespaces:
        return self.echo.get("namespaces", {})

    def previous(self) -> Previous:
        """The conversation so far."""
        messages = [*self.turn.messages[self.num_instructions :], self.turn.response]
        return Previous(turn_id=self.turn.turn_id, messages=messages)

    def input_items(self) -> list[Body]:
        """What the reply answered: the whole conversation before it."""
        messages = self.turn.messages[self.num_instructions :]
        return input_items(self.turn.turn_id, messages, self._namespaces)

    def output_items(self) -> list[Body]:
        """The items of the reply."""
        status = status_of(self.turn.finish_reason)
        item_status = "completed" if status == "completed" else "incomplete"
        return reply_items(self.turn.turn_id, self.turn.response, item_status, self._namespaces)

    def body(self, model: str, reasoning_end_id: int | None) -> Body:
        """The response as it was sent, under `model` if its name is not known."""
        turn = self.turn
        head = Head(
            turn_id=turn.turn_id,
            model=self.echo.get("model", model),
            instructions=turn.messages[0]["content"] if self.num_instructions else None,
            tools=turn.tools,
            echo=self.echo,
        )
        usage = Usage(
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.response_ids),
            cached_tokens=turn.sampling["num_cached_tokens"],
        )
        reasoning = num_reasoning_tokens(
            turn.response_ids.tolist(), turn.response.get("reasoning_content"), reasoning_end_id
        )
        status = status_of(turn.finish_reason)
        fault = {"code": "server_error", "message": "The reply was interrupted."}
        error = fault if status == "failed" else None
        return head.body(status, self.output_items(), usage_body(usage, reasoning), error)


async def response_of(service: TurnService, scope: str, response_id: str) -> StoredResponse:
    """A response by id. Raises ApiError 404 if this key has none, 503 if the store does not
    answer.
    """
    match = _RESPONSE_ID.fullmatch(response_id)
    stored = await _load(service, scope, match[1]) if match else None
    if stored is None:
        raise _not_found("Response", response_id)
    return stored


async def delete(service: TurnService, scope: str, response_id: str) -> None:
    """Make a response unreadable. Raises ApiError like `response_of`."""
    stored = await response_of(service, scope, response_id)
    try:
        await service.deps.store.erase_request_echo(scope, stored.turn.turn_id)
    except StoreError as error:
        raise store_unavailable(service.config.retry_after_s) from error


async def with_references(service: TurnService, scope: str, given: Any) -> Any:
    """Input items, with references to earlier reply items replaced by those items.

    Raises ApiError 404 for an item that this key does not have, 503 if the store does not answer.
    """
    if not isinstance(given, list):
        return given
    known: dict[str, dict[str, Body]] = {}
    items = []
    for item in given:
        if not _is_reference(item):
            items.append(item)
            continue
        turn_id = turn_of_item(item["id"])
        if turn_id and turn_id not in known:
            if len(known) == _MAX_REFERRED:
                message = f"References lead to more than {_MAX_REFERRED} responses."
                raise beyond("references", message, "input", "array_above_max_length")
            stored = await _load(service, scope, turn_id)
            known[turn_id] = _by_id(stored.output_items()) if stored else {}
        found = known[turn_id].get(item["id"]) if turn_id else None
        if found is None:
            raise _not_found("Item", item["id"])
        items.append(found)
    return items


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or item.keys() <= {"id", "type"}


def _by_id(items: Sequence[Body]) -> dict[str, Body]:
    return {item["id"]: item for item in items}


async def _load(service: TurnService, scope: str, turn_id: str) -> StoredResponse | None:
    store = service.deps.store
    try:
        echo = await store.request_echo(scope, turn_id)
        turn = await store.turn(turn_id) if echo is not None else None
    except StoreError as error:
        raise store_unavailable(service.config.retry_after_s) from error
    # An empty one was too long to be searched and kept.
    if not echo or turn is None:
        if service.spool.is_waiting:
            # It may still be waiting to be stored.
            raise store_unavailable(service.config.retry_after_s)
        return None
    return StoredResponse(turn=turn, echo=echo)


def _not_found(kind: str, name: str) -> ApiError:
    return ApiError(404, f"{kind} with id {name[:100]!r} not found.", param="id")
