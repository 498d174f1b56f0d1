"""A reply as the client gets it, and the pieces in which it is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass

from records.messages import Message

TEXT_ROLE = "text"
"""Role of what is not a message of a conversation: a text prompt and its continuation."""
_CALL_ID = re.compile(r"\bcall_([0-9a-f]{32})[0-9a-f]{2}\b")


def call_id(turn_id: str, index: int) -> str:
    """The id of a turn's call: 39 characters, of the 40 that OpenAI's API takes."""
    return f"call_{turn_id}{index % 256:02x}"


def turns_called_in(text: str) -> list[str]:
    """The ids of the turns whose calls are named in `text`, each once."""
    return list(dict.fromkeys(_CALL_ID.findall(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCall:
    """A tool call as the client gets it; `arguments` is what the policy wrote, parsable or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of the tool call at `index` among the reply's calls.

    The first piece carries `id` and `name` and no arguments; each further one a fragment of them.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What may be sent now; exactly one of content, reasoning and call is set."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply as the client got it; `has_open_call`: its last call was never closed."""

    content: str
    reasoning: str | None
    tool_calls: tuple[SentCall, ...]
    has_open_call: bool = False

    @property
    def calls_tools(self) -> bool:
        """Whether the reply ends with calls to be run."""
        return bool(self.tool_calls) and not self.has_open_call

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to react to."""
        return not (self.content or self.reasoning or self.tool_calls)

    def text_message(self) -> Message:
        """The continuation of a text, which no assistant message of a conversation equals."""
        return {"role": TEXT_ROLE, "content": self.content}

    def message(self) -> Message:
        """The assistant message that the client gets and later sends back."""
        message: Message = {
            "role": "assistant",
            "content": None if self.tool_calls and not self.content else self.content,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message
