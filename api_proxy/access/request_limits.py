"""How much a request may contain, checked before anything is made from it.

The number of things in it has limits of its own. Its text is bounded by the context: a token stands
for a few bytes, so far more bytes than that cannot fit, however they are tokenised. What passes is
linear work for everything after this; the exact length is checked once it is rendered.

It knows where requests of any of the APIs keep their lists, and nothing else about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError, beyond, body_too_large, cannot_fit, invalid
from api_proxy.request.json_scan import JsonSize, is_surely_within, json_size

_LEAST_BYTES = 16_384
"""Bytes of text that are accepted here, however short the context is."""
_ESCAPED = 6
"""Bytes of JSON for a byte of text, at most: `\\u0041`."""
_ITEMS_OF_A_MESSAGE = 4
"""A message in the Responses API: reasoning, text, a call and its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of one application; `context_length` is None until the engine has reported it."""

    config: ProxyConfig
    context_length: int | None

    @property
    def max_text_bytes(self) -> int | None:
        """Bytes of messages, tools and schemas together, as JSON; None: no more than a body."""
        if self.context_length is None:
            return None
        return max(self.context_length * self.config.max_bytes_per_token, _LEAST_BYTES)

    def check_length(self, num_bytes: int) -> None:
        """Raises ApiError for a body that is too long to be looked at."""
        if num_bytes > self.config.max_body_bytes:
            raise body_too_large(self.config.max_body_bytes)
        most = self.max_text_bytes
        if most is not None and num_bytes > most * _ESCAPED + _LEAST_BYTES:
            raise self._cannot_fit(num_bytes)

    def read(self, raw: bytes, num_more_values: int = 0) -> dict[str, Any]:
        """The JSON object in `raw`, its lists no longer than allowed. Raises ApiError 400."""
        most = JsonSize(
            num_values=self.config.max_json_values + num_more_values,
            depth=self.config.max_json_depth,
        )
        if not is_surely_within(raw, most):
            _check_size(json_size(raw), most)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise invalid("The request body is not valid JSON.", code="invalid_json") from None
        if not isinstance(body, dict):
            raise invalid("The request body must be a JSON object.", code="invalid_json")
        self._check_lists(body)
        return body

    def check_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> int:
        """The bytes of what is rendered, as JSON. Raises ApiError 400 if they cannot fit."""
        try:
            num_bytes = len(orjson.dumps([messages, tools]))
        except TypeError:
            raise invalid("The request is nested too deeply.", "messages") from None
        if self.max_text_bytes is not None and num_bytes > self.max_text_bytes:
            raise self._cannot_fit(num_bytes)
        return num_bytes

    def check_arguments(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises ApiError 400 if the arguments of all calls, which are parsed, contain too much."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        texts = [str(call["function"].get("arguments")) for call in calls]
        most = self.config.max_json_values
        if sum(1 + sum(map(text.count, "[{,")) for text in texts) <= most:
            return  # counting those inside strings, too
        number = 0
        for text in texts:
            number += json_size(text.encode("utf-8", "surrogatepass")).num_values
            if number > most:
                fault = f"The arguments of all calls contain more than {most} JSON values."
                raise beyond("json_values", fault, "messages", "invalid_value")

    def check_schemas(self, schemas: Sequence[Any], param: str) -> None:
        """Raises ApiError 400 for schemas too long to make a grammar from."""
        num_bytes, most = len(orjson.dumps(list(schemas))), self.config.max_schema_bytes
        if num_bytes > most:
            message = (
                f"The schemas that the reply must match have {num_bytes} bytes; at most {most}."
            )
            raise beyond("schema", message, param, "invalid_value")

    def _cannot_fit(self, num_bytes: int) -> ApiError:
        assert self.context_length is not None
        return cannot_fit(num_bytes, self.context_length, self.config.max_bytes_per_token)

    def _check_lists(self, body: dict[str, Any]) -> None:
        config = self.config
        _check_list("messages", body.get("messages"), config.max_messages)
        _check_list("input", body.get("input"), config.max_messages * _ITEMS_OF_A_MESSAGE)
        _check_list("system", body.get("system"), config.max_parts)
        for name in ("messages", "input"):
            entries = body.get(name)
            for number, entry in enumerate(entries if isinstance(entries, list) else ()):
                if isinstance(entry, dict):
                    self._check_message(f"{name}[{number}]", entry)
        _check_tools(body.get("tools"), config.max_tools)
        _check_bias(body.get("logit_bias"), config.max_logit_bias)

    def _check_message(self, place: str, message: dict[str, Any]) -> None:
        most_calls, most = self.config.max_tool_calls, self.config.max_parts
        _check_list(f"{place}.tool_calls", message.get("tool_calls"), most_calls)
        for name in ("content", "output"):
            parts = message.get(name)
            _check_list(f"{place}.{name}", parts, most)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and isinstance(part.get("content"), list):
                    # The parts of a tool's result, in Anthropic's API.
                    _check_list(f"{place}.{name}[{number}].content", part["content"], most)


def _check_size(size: JsonSize, most: JsonSize) -> None:
    if size.num_values > most.num_values:
        message = f"The request contains more than {most.num_values} JSON values."
        raise beyond("json_values", message, None, "request_too_large")
    if size.depth > most.depth:
        message = f"The request nests deeper than {most.depth} levels."
        raise beyond("json_depth", message, None, "invalid_value")


def _check_list(place: str, given: Any, most: int) -> None:
    if isinstance(given, list) and len(given) > most:
        raise _too_long(place, len(given), most)


def _check_tools(tools: Any, most: int) -> None:
    """Functions and the groups that they are in count alike."""
    if not isinstance(tools, list):
        return
    groups = [tool.get("tools") for tool in tools if isinstance(tool, dict)]
    number = len(tools) + sum(len(group) for group in groups if isinstance(group, list))
    if number > most:
        raise _too_long("tools", number, most)


def _check_bias(bias: Any, most: int) -> None:
    if isinstance(bias, dict) and len(bias) > most:
        message = (
            f"Invalid 'logit_bias': too many properties. Expected an object with at most {most} "
            f"properties, but got an object with {len(bias)} properties instead."
        )
        raise beyond("logit_bias", message, "logit_bias", "object_above_max_properties")


def _too_long(place: str, number: int, most: int) -> ApiError:
    message = (
        f"Invalid '{place}': array too long. Expected an array with maximum length {most}, but got "
        f"an array with length {number} instead."
    )
    # The last name: messages[3].content has the limit of every content.
    limit = place.split(".")[-1].split("[")[0]
    return beyond(limit, message, place, "array_above_max_length")


MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits: pairs, characters of a key, characters of a value."""


def check_metadata(metadata: Any) -> None:
    """Raises ApiError 400 unless `metadata` is a small object of texts, or None."""
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise invalid("Invalid 'metadata': must be an object.", "metadata", "invalid_type")
    if len(metadata) > MAX_METADATA:
        message = (
            "Invalid 'metadata': too many properties. Expected an object with at most "
            f"{MAX_METADATA} properties, but got an object with {len(metadata)} properties instead."
        )
        raise beyond("metadata", message, "metadata", "object_above_max_properties")
    for key, value in metadata.items():
        if not isinstance(value, str):
            place = f"metadata.{key[:MAX_METADATA_KEY]}"
            raise invalid(f"Invalid '{place}': must be a string.", place, "invalid_type")
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = (
                f"Invalid 'metadata': string too long. Keys have at most {MAX_METADATA_KEY} "
                f"characters and values {MAX_METADATA_VALUE}."
            )
            raise beyond("metadata", message, "metadata", "string_above_max_length")
