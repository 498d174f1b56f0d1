"""What a client may send to `/v1/chat/completions`: parsed, checked, and the refusals worded.

The models check; the messages and tools that go on are the client's own dicts, unchanged, because
they are the identity of a conversation. Fields of other vendors are ignored; fields of OpenAI's API
that change the answer and are not implemented are refused by name. A function's `strict` is read
on: its arguments fit its schema wherever a call is asked for (`tool_choice`); where the model is
free to answer, it stays the policy's own distribution, which is what trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from api_proxy.errors import ApiError, invalid, unsupported
from records.messages import Message
from records.names import TurnType

MAX_CHOICES = 16
"""Answers to one request."""
MAX_STOPS = 16
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class CalledFunction(BaseModel):
    """The function of a tool call in the history; its arguments may be text that does not parse."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """One tool call of an assistant message in the history."""

    id: str | None = None
    function: CalledFunction


class ContentPart(BaseModel):
    """One part of a message's content; only text can be rendered."""

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _only_text(cls, kind: str) -> str:
        if kind not in _TEXT_PARTS:
            raise ValueError("only text content parts are supported")
        return kind


class ChatMessage(BaseModel):
    """One message of the history."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart | str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]


class Tool(BaseModel):
    """A tool that is offered with the request."""

    type: Literal["function"] = "function"
    function: Function


class NamedChoice(BaseModel):
    """A `tool_choice` that names its function."""

    type: Literal["function"] = "function"
    function: Function


class JsonSchema(BaseModel):
    """A named JSON schema; the answer fits it whether `strict` is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    """The shape asked of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs 'json_schema'")
        return self


class StreamOptions(BaseModel):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields that are read; everything else in the body is ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    turn_type: Literal[TurnType.MAIN, TurnType.SIDE] | None = None
    session_done: bool | None = None

    @property
    def reply_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must fit; None for text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.json_schema is not None and asked.type == "json_schema":
            return asked.json_schema.schema_ or {}
        return {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked request: its fields, and the client's own messages and tools.

    `request_echo` is what the response repeats of it, and what its client may read again later if
    `is_retrievable`; `parent_turn_id` the turn that it says it continues. `prompt_ids` are those of
    a text to be continued, for which there is nothing to render.
    """

    fields: ChatRequest
    messages: list[Message]
    tools: list[dict[str, Any]]
    session: str | None
    turn_type: TurnType | None
    session_done: bool
    teacher: str | None = None
    request_echo: dict[str, Any] | None = None
    is_retrievable: bool = False
    prompt_ids: tuple[int, ...] | None = None
    parent_turn_id: str | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings; empty ones are left out."""
        stop = self.fields.stop
        texts = [stop] if isinstance(stop, str) else stop or []
        return tuple(text for text in texts if text)

    @property
    def requested_tokens(self) -> int | None:
        """The reply budget that the client asked for."""
        newer = self.fields.max_completion_tokens
        return newer if newer is not None else self.fields.max_tokens

    @property
    def user_id(self) -> str | None:
        """The end user that the client answers for, under OpenAI's newer or older name."""
        return self.fields.safety_identifier or self.fields.user or None

    @property
    def include_usage(self) -> bool:
        """Whether a streamed reply ends with a usage chunk."""
        options = self.fields.stream_options
        return options is not None and options.include_usage


def parse_completion(raw: bytes, headers: Mapping[str, str], max_messages: int) -> Completion:
    """The request in `raw`; session fields may stand in the headers, which win over the body.

    Raises ApiError 400 on anything that cannot be served.
    """
    return completion_of(json_object(raw), headers, max_messages)


def completion_of(
    body: dict[str, Any], headers: Mapping[str, str], max_messages: int
) -> Completion:
    """The request whose fields are `body`: what a client sent, or what another API's request means.

    Raises ApiError 400 on anything that cannot be served.
    """
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > max_messages:
        raise invalid(
            f"'messages' has {len(messages)} entries; at most {max_messages} are accepted.",
            "messages",
        )
    try:
        fields = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _worded(error) from None
    _refuse_unsupported(fields, body)
    tools = body.get("tools") or []
    _check_tool_choice(fields)
    return Completion(
        fields=fields,
        messages=body["messages"],
        tools=tools,
        session=_session(headers, fields),
        turn_type=_turn_type(headers, fields),
        session_done=_session_done(headers, fields),
        teacher=_teacher(headers),
    )


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError 400 if it is none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise invalid("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    return body


def _worded(error: ValidationError) -> ApiError:
    """The first fault of a request, with OpenAI's way of naming its place."""
    fault = error.errors(include_input=False, include_context=False, include_url=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in ChatRequest.model_fields or step in _NESTED_FIELDS:
            param += f".{step}" if param else step
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{param}': {fault['msg']}.", param or None, code)


_NESTED_FIELDS = {"schema"} | {
    name
    for model in (
        *(ChatMessage, ToolCall, CalledFunction, ContentPart, Tool, Function),
        *(ResponseFormat, JsonSchema),
    )
    for name in model.model_fields
}


def _refuse_unsupported(fields: ChatRequest, body: dict[str, Any]) -> None:
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options"):
        if body.get(name):
            raise unsupported(f"'{name}' is not supported.", name)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' = true.", "top_logprobs")


def _check_tool_choice(fields: ChatRequest) -> None:
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not fields.tools:
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    if isinstance(choice, NamedChoice):
        names = {tool.function.name for tool in fields.tools}
        if choice.function.name not in names:
            raise invalid("'tool_choice' names a function that 'tools' lacks.", "tool_choice")


def _session(headers: Mapping[str, str], fields: ChatRequest) -> str | None:
    name = headers.get("x-session-id") or fields.session_id
    if name is not None and (len(name) > 256 or not name.isprintable()):
        raise invalid("A session id has at most 256 characters, all printable.", "session_id")
    return name


def _teacher(headers: Mapping[str, str]) -> str | None:
    name = headers.get("x-teacher", "").strip()
    if len(name) > 256 or not name.isprintable():
        raise invalid("'X-Teacher' has at most 256 characters, all printable.", "teacher")
    return name or None


def _turn_type(headers: Mapping[str, str], fields: ChatRequest) -> TurnType | None:
    text = headers.get("x-turn-type")
    if text is None:
        return fields.turn_type
    named = text.strip().lower()
    if named not in (TurnType.MAIN, TurnType.SIDE):
        raise invalid("'X-Turn-Type' must be 'main' or 'side'.", "turn_type")
    return TurnType(named)


def _session_done(headers: Mapping[str, str], fields: ChatRequest) -> bool:
    text = headers.get("x-session-done")
    if text is None:
        return bool(fields.session_done)
    return text.strip().lower() in ("1", "true", "yes")
