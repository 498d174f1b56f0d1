"""What a client may send to `/v1/responses`: the fields that are read; others are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field


class TextPart(BaseModel):
    """A piece of text, of the user or of an earlier reply."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(BaseModel):
    """An earlier refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Its words."""
        return self.refusal


def _as_parts(content: Any) -> Any:
    """A string is one part."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts: TypeAlias = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    Field(fail_fast=True),
    BeforeValidator(_as_parts),
]


class MessageItem(BaseModel):
    """A message; `id` is set on those of earlier replies."""

    type: Literal["message"]
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCall(BaseModel):
    """A call of an earlier reply."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionCallOutput(BaseModel):
    """What a tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(BaseModel):
    """Reasoning of an earlier reply; a summary of it is not the reasoning."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Parts | None = None


def _with_type(item: Any) -> Any:
    """Messages may leave their type out."""
    if isinstance(item, dict) and "type" not in item and "role" in item:
        return {**item, "type": "message"}
    return item


Item: TypeAlias = Annotated[
    Annotated[
        MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_with_type),
]


def _as_items(given: Any) -> Any:
    """A string is one message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(BaseModel):
    """A function that the client runs."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(BaseModel):
    """The requested shape of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(BaseModel):
    """`verbosity` is ignored."""

    format: TextFormat | None = None


class ResponsesRequest(BaseModel):
    """The fields that are read."""

    model: str
    input: Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_as_items)] = Field(
        default_factory=list
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
