"""What a model's own chat template shows of a conversation, found by rendering probes.

Some templates ignore tools, some refuse or ignore a system message. What would vanish silently is
refused here; a system message goes in front of the first user's text if the family expects it there
(Gemma, Mistral). Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from records.messages import Message
from rollout_bridge.rendering.templates.errors import TemplateErrors, Unrenderable

_TOOL_NAME, _SYSTEM_TEXT = "zanzibar_ferry", "Zanzibar sends greetings."
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Times of ferries.",
        "parameters": {"type": "object", "properties": {"day": {"type": "string"}}},
    },
}
_USER: Message = {"role": "user", "content": "Hello."}
_SYSTEM: Message = {"role": "system", "content": _SYSTEM_TEXT}
_MERGES_SYSTEM = ("<start_of_turn>", "[INST]")
"""Found in templates of families that get the system's text in the first user message."""


class TemplateTraits:
    """The traits of one tokenizer's template, with these switches set."""

    def __init__(self, tokenizer: Any, variables: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._variables = variables or {}

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a tool appears in the prompt."""
        return _TOOL_NAME in self._probe([_USER], [_TOOL])

    @cached_property
    def shows_system(self) -> bool:
        """Whether the text of a system message appears in the prompt."""
        return _SYSTEM_TEXT in self._probe([_SYSTEM, _USER], None)

    @cached_property
    def merges_system(self) -> bool:
        """Whether such a text is put before the first user's."""
        text = self._probe([_USER], None)
        return not self.shows_system and any(mark in text for mark in _MERGES_SYSTEM)

    def shaped(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        """The messages as this template can show them. Raises Unrenderable for what it cannot."""
        if tools and not self.shows_tools:
            raise Unrenderable(
                "the model's chat template does not show tools: send the request without 'tools', "
                "or give the model a template that shows them"
            )
        if self.shows_system or not any(one["role"] == "system" for one in messages):
            return list(messages)
        if not self.merges_system:
            raise Unrenderable(
                "the model's chat template does not show messages of the role 'system': put their "
                "text into the first user message"
            )
        return _merged(messages)

    @property
    def warnings(self) -> list[str]:
        """Lines about what a run should know of its model's template."""
        lines = []
        if not self.shows_tools:
            lines.append("the model's chat template ignores tools: requests with tools are refused")
        if not self.shows_system:
            how = (
                "their text goes in front of the first user message"
                if self.merges_system
                else "requests with one are refused"
            )
            lines.append(f"the model's chat template shows no system messages: {how}")
        return lines

    def _probe(self, messages: list[Message], tools: list[Any] | None) -> str:
        try:
            with TemplateErrors():
                return self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._variables,
                )
        except ValueError:
            return ""


def _merged(messages: Sequence[Message]) -> list[Message]:
    """The messages, with opening system messages put in front of the first user message's text."""
    first = next((at for at, one in enumerate(messages) if one["role"] != "system"), None)
    if first is None or messages[first]["role"] != "user":
        raise Unrenderable("a message of the role 'system' must be followed by a user message")
    texts = [one["content"] for one in messages[: first + 1]]
    opening = {**messages[first], "content": "\n\n".join(text for text in texts if text)}
    return [opening, *messages[first + 1 :]]
