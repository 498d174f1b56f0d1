"""How a reply is made to be a tool call: token ids that open it and are not sampled.

`tool_choice` "required" opens a call, a named function opens a call of that function. What a call
looks like is read off the rendering itself, from a made-up message with a call in it. Forced ids
belong to the prompt; a turn that they open is marked `forced_prefix`, because its first sampled
tokens are not what the policy would have begun with.
"""

from __future__ import annotations

from api_proxy.errors import unsupported
from api_proxy.schemas import ChatRequest, NamedChoice
from rollout_bridge.rendering import Rendering

_EXAMPLE = "example_function"


class CallForcer:
    """The ids that open a tool call, for one rendering."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._known: dict[str, list[int]] = {}

    def forced_ids(self, request: ChatRequest) -> list[int]:
        """The ids to sample after, [] for none. Raises ApiError if this model's calls cannot be."""
        choice = request.tool_choice
        if choice in (None, "auto", "none"):
            return []
        name = choice.function.name if isinstance(choice, NamedChoice) else None
        key = name or ""
        if key not in self._known:
            text = self._opening(name)
            ids = self._rendering.tokenizer.encode(text, add_special_tokens=False)
            if len(self._known) > 1000:
                self._known.clear()
            self._known[key] = list(ids)
        return self._known[key]

    def _opening(self, name: str | None) -> str:
        """The text of a call up to its function's name, or up to its arguments."""
        start_id = self._rendering.tool_call_start_id
        marker = "" if start_id is None else self._rendering.decode([start_id])
        call = {"name": name or _EXAMPLE, "arguments": "{}"}
        example = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
            },
        ]
        text = self._rendering.decode(self._rendering.prompt_ids(example, []))
        _, found, block = text.rpartition(marker) if marker else ("", "", "")
        if not found:
            raise unsupported("This model cannot be made to call a tool.", "tool_choice")
        if name is None:
            return marker + block[: len(block) - len(block.lstrip())]
        before, found, _ = block.partition("{}")
        if not found or name not in before:
            raise unsupported("This model cannot be made to call a named tool.", "tool_choice")
        return marker + before.rstrip()
