"""What a client may send to `/v1/messages`: the fields that are read; others are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field


class Text(BaseModel):
    """A text block; `cache_control` and citations are ignored."""

    type: Literal["text"]
    text: str


class Thinking(BaseModel):
    """Reasoning of an earlier reply, sent back."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(BaseModel):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _as_blocks(content: Any) -> Any:
    """A string is one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts: TypeAlias = Annotated[
    list[Annotated[Text, Field(discriminator="type")]],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks),
]


class ToolResult(BaseModel):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool = False


UserBlock: TypeAlias = Annotated[Text | ToolResult, Field(discriminator="type")]
AssistantBlock: TypeAlias = Annotated[Text | Thinking | ToolUse, Field(discriminator="type")]


class UserMessage(BaseModel):
    """The user's words and the results of tools."""

    role: Literal["user"]
    content: Annotated[list[UserBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class AssistantMessage(BaseModel):
    """An earlier reply."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class SystemMessage(BaseModel):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Texts


AnyMessage: TypeAlias = Annotated[
    UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")
]


class Tool(BaseModel):
    """A tool of the client; the API's own tools have another `type`."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    """Which tools the reply may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(BaseModel):
    """`format` asks for JSON of a schema; `effort` is ignored."""

    format: dict[str, Any] | None = None


class MessagesRequest(BaseModel):
    """The fields that are read."""

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
