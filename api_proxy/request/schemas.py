"""What a client may send to `/v1/chat/completions`: parsed and checked, with the texts of refusals.

The models check; the messages and tools that go on are the client's own dicts, unchanged, because
they are the identity of a conversation. `fields` decides about all other fields. A function's
`strict` changes nothing: its arguments match its schema whenever a call is required
(`tool_choice`); if the model is free to answer, the distribution stays the policy's own, which is
what trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from api_proxy.access.request_limits import RequestLimits, check_metadata
from api_proxy.errors import ApiError, beyond, invalid, unsupported
from api_proxy.request.fields import check_fields, text_only
from records.messages import Message
from records.names import TurnType

MAX_CHOICES = 16
"""Answers to one request."""
MAX_STOPS = 16
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=8192)]
Choices: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)
]


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
    content: str | Annotated[list[ContentPart | str], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
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


class AllowedTools(BaseModel):
    """The tools of a request that the model may call, or must call one of."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


class AllowedChoice(BaseModel):
    """A `tool_choice` that offers some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(BaseModel):
    """A named JSON schema; the answer matches it whether `strict` is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(BaseModel):
    """The requested shape of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs 'json_schema'")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's way to say what the answer must be: one of these; anything else in it is refused."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    json_object: bool | None = None


class TemplateKwargs(BaseModel):
    """Switches of the chat template; `Rendering.with_thinking` says whether it has this one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None


class StreamOptions(BaseModel):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields that are read."""

    model_config = ConfigDict(extra="ignore")

    model: str
    # Only the first of many faults is reported; gathering all of them would be wasted work.
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | AllowedChoice | None = None
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
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    regex: Pattern | None = None
    guided_regex: Pattern | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    turn_type: Literal[TurnType.MAIN, TurnType.SIDE] | None = None
    session_done: bool | None = None

    @property
    def enable_thinking(self) -> bool | None:
        """The chat template's switch for this request; None: the run's default."""
        switches = self.chat_template_kwargs
        return None if switches is None else switches.enable_thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an answer must be: JSON that matches `schema`, what `regex` matches, or one of
    `choices`.
    """

    schema: dict[str, Any] | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked request: its fields, and the client's own messages and tools.

    `request_echo` is what the response repeats from it, and what its client may read again later if
    `is_retrievable`; `parent_turn_id` the turn that it says it continues. `prompt_ids` are those of
    a text to be continued, for which there is nothing to render. `shape` is what the answer must be
    (None: any text), `ignored` the fields that have no effect.
    """

    fields: ChatRequest
    messages: list[Message]
    tools: list[dict[str, Any]]
    session: str | None
    turn_type: TurnType | None
    session_done: bool
    teacher: str | None = None
    source: str | None = None
    request_echo: dict[str, Any] | None = None
    is_retrievable: bool = False
    prompt_ids: tuple[int, ...] | None = None
    parent_turn_id: str | None = None
    traceparent: str | None = None
    """The agent's own trace (W3C Trace Context)."""
    num_bytes: int = 0
    """Of messages and tools together, as JSON."""
    shape: Shape | None = None
    ignored: tuple[str, ...] = ()

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
        """The end user of the client, under OpenAI's newer or older name."""
        return self.fields.safety_identifier or self.fields.user or None

    @property
    def include_usage(self) -> bool:
        """Whether a streamed reply ends with a usage chunk."""
        options = self.fields.stream_options
        return options is not None and options.include_usage


def completion_of(
    body: dict[str, Any], headers: Mapping[str, str], limits: RequestLimits
) -> Completion:
    """The request whose fields are `body`: what a client sent, or what another API's request means.
    Session fields may be in the headers, which take precedence over the body.

    Raises ApiError 400 on anything that cannot be served.
    """
    messages = body.get("messages")
    most = limits.config.max_messages
    if isinstance(messages, list) and len(messages) > most:
        raise beyond(
            "messages",
            f"The conversation has {len(messages)} messages; at most {most} are accepted.",
            "messages",
            "array_above_max_length",
        )
    check_metadata(body.get("metadata"))
    if isinstance(messages, list):
        _check_parts(messages)
    try:
        fields = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _worded(error) from None
    ignored = check_fields(body, ChatRequest.model_fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' = true.", "top_logprobs")
    tools = body.get("tools") or []
    _check_tool_choice(fields)
    num_bytes = limits.check_prompt(body["messages"], tools)
    limits.check_arguments(body["messages"])
    if isinstance(fields.tool_choice, AllowedChoice):
        allowed = fields.tool_choice.allowed_tools
        names = {tool.function.name for tool in allowed.tools}
        # The model is shown no others.
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        fields = fields.model_copy(update={"tool_choice": allowed.mode})
    shape = _shape(fields)
    _check_schemas(shape, fields.tool_choice, tools, limits)
    return Completion(
        fields=fields,
        messages=body["messages"],
        tools=tools,
        session=_session(headers, fields),
        turn_type=_turn_type(headers, fields),
        session_done=_session_done(headers, fields),
        teacher=_name_in(headers, "X-Teacher", "teacher"),
        source=_name_in(headers, "X-Data-Source", "data_source"),
        traceparent=headers.get("traceparent"),
        num_bytes=num_bytes,
        shape=shape,
        ignored=ignored,
    )


def _worded(error: ValidationError) -> ApiError:
    """The first fault of a request, with OpenAI's way of naming its place."""
    fault = error.errors(include_input=False, include_context=False, include_url=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in ChatRequest.model_fields or step in _NESTED_FIELDS:
            param += f".{step}" if param else step
    if fault["type"] == "extra_forbidden":
        param = f"{param}.{str(fault['loc'][-1])[:100]}"
        return unsupported(f"'{param}' is not supported.", param)
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    return invalid(f"Invalid value for '{param}': {fault['msg']}.", param or None, code)


_NESTED_FIELDS = {"schema"} | {
    name
    for model in (
        *(ChatMessage, ToolCall, CalledFunction, ContentPart, Tool, Function),
        *(ResponseFormat, JsonSchema, StructuredOutputs, TemplateKwargs),
        *(AllowedChoice, AllowedTools),
    )
    for name in model.model_fields
}


def _shape(fields: ChatRequest) -> Shape | None:
    """What the answer must be. Raises ApiError 400 if it must be several things."""
    asked, wanted = fields.response_format, fields.structured_outputs
    given: dict[str, Shape] = {}
    if asked is not None and asked.type == "json_schema" and asked.json_schema is not None:
        given["response_format"] = Shape(schema=asked.json_schema.schema_ or {})
    elif asked is not None and asked.type == "json_object":
        given["response_format"] = Shape(schema=_ANY_OBJECT)
    for name in ("regex", "guided_regex"):
        if (pattern := getattr(fields, name)) is not None:
            given[name] = Shape(regex=pattern)
    if fields.guided_json is not None:
        given["guided_json"] = Shape(schema=_schema_of(fields.guided_json, "guided_json"))
    if fields.guided_choice is not None:
        given["guided_choice"] = Shape(choices=tuple(fields.guided_choice))
    if wanted is not None:
        given |= _structured(wanted)
    if len(given) > 1:
        names = " and ".join(f"'{name}'" for name in given)
        raise invalid(f"An answer has one form: send one of {names}.", next(reversed(given)))
    return next(iter(given.values()), None)


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def _structured(wanted: StructuredOutputs) -> dict[str, Shape]:
    given: dict[str, Shape] = {}
    if wanted.json_ is not None:
        name = "structured_outputs.json"
        given[name] = Shape(schema=_schema_of(wanted.json_, name))
    if wanted.regex is not None:
        given["structured_outputs.regex"] = Shape(regex=wanted.regex)
    if wanted.choice is not None:
        given["structured_outputs.choice"] = Shape(choices=tuple(wanted.choice))
    if wanted.json_object:
        given["structured_outputs.json_object"] = Shape(schema=_ANY_OBJECT)
    return given


def _schema_of(given: dict[str, Any] | str, name: str) -> dict[str, Any]:
    """A JSON schema that may have been sent as text."""
    if isinstance(given, dict):
        return given
    try:
        schema = orjson.loads(given)
    except orjson.JSONDecodeError:
        schema = None
    if not isinstance(schema, dict):
        raise invalid(f"'{name}' must be a JSON schema: an object, or its text.", name)
    return schema


def _check_parts(messages: list[Any]) -> None:
    """Raises ApiError 400 with the place of the first part that is not text."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if message.get("audio"):
            raise text_only(f"messages[{index}].audio", "audio")
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _TEXT_PARTS:
                raise text_only(f"messages[{index}].content[{at}]", kind)


def _check_tool_choice(fields: ChatRequest) -> None:
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not fields.tools:
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice")
    offered = {tool.function.name for tool in fields.tools}
    if isinstance(choice, NamedChoice):
        named = [choice]
    else:
        named = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else []
    if any(one.function.name not in offered for one in named):
        raise invalid("'tool_choice' names a function that is not in 'tools'.", "tool_choice")


def _check_schemas(
    shape: Shape | None,
    choice: str | NamedChoice | AllowedChoice | None,
    tools: Sequence[dict[str, Any]],
    limits: RequestLimits,
) -> None:
    """Check what becomes a grammar: the form of the text, and the schemas of the calls that it
    allows.
    """
    given: list[Any] = []
    if shape is not None:
        given.append(shape.schema if shape.schema is not None else [shape.regex, *shape.choices])
    if isinstance(choice, NamedChoice) or choice == "required":
        name = choice.function.name if isinstance(choice, NamedChoice) else None
        given += [tool for tool in tools if name in (None, tool["function"]["name"])]
    elif shape is not None and choice != "none":
        given += tools
    if given:
        limits.check_schemas(given, "tools" if shape is None else "response_format")


def _session(headers: Mapping[str, str], fields: ChatRequest) -> str | None:
    name = headers.get("x-session-id") or fields.session_id
    if name is not None and (len(name) > 256 or not name.isprintable()):
        raise invalid("A session id has at most 256 characters, all printable.", "session_id")
    return name


def _name_in(headers: Mapping[str, str], header: str, param: str) -> str | None:
    name = headers.get(header.lower(), "").strip()
    if len(name) > 256 or not name.isprintable():
        raise invalid(f"'{header}' has at most 256 characters, all printable.", param)
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
