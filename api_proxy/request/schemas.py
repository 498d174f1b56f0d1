"""What the body of `/v1/chat/completions` may contain, as models that check each value.

`completion` makes a request of it. `fields` decides about fields that are not here. A function's
`strict` changes nothing: its arguments match its schema whenever a call is required
(`tool_choice`); if the model is free to answer, the distribution stays the policy's own, which is
what trains.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from records.names import TurnType

MAX_CHOICES = 16
"""Answers to one request."""
MAX_STOPS = 16
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=8192)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
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
        if kind not in TEXT_PARTS:
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
    session_id: Name | None = None
    turn_type: Literal[TurnType.MAIN, TurnType.SIDE] | None = None
    session_done: bool | None = None
    teacher: Name | None = None
    data_source: Name | None = None

    @property
    def enable_thinking(self) -> bool | None:
        """The chat template's switch for this request; None: the run's default."""
        switches = self.chat_template_kwargs
        return None if switches is None else switches.enable_thinking


NESTED_FIELDS = {"schema"} | {
    name
    for model in (
        *(ChatMessage, ToolCall, CalledFunction, ContentPart, Tool, Function),
        *(ResponseFormat, JsonSchema, StructuredOutputs, TemplateKwargs),
        *(AllowedChoice, AllowedTools),
    )
    for name in model.model_fields
}
"""Fields of objects within a request, as its client names them."""
