"""What a reply must be: a call of some tool, JSON that matches a schema, or anything.

With `tool_choice` "required" or a function's name, the reply must be calls of such tools, with
arguments that match their schema; with `response_format` (or a regular expression, or a list of
answers), it must be such a text, or calls. The engine samples under the grammar that is built here:
a structural tag, whose markers are single tokens by id. How this model writes a call is read from
the rendering of a made-up message with two calls.

The token that opens a required call is forced: it belongs to the prompt and is not sampled. If a
family does not write its calls as JSON, there is no grammar for them; only what opens a call is
forced. Neither is the plain softmax: such turns are marked `grammar` or `forced_prefix`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api_proxy.errors import unsupported
from api_proxy.request.completion import Completion, Shape
from api_proxy.request.schemas import NamedChoice
from records.types import Ids
from rollout_bridge.engine.types import Grammar
from rollout_bridge.rendering.rendering import Rendering

Element = dict[str, Any]

_EXAMPLES = ("example_function", "other_function")
_EXAMPLE_ARGUMENTS = '{"example_key": "example_value"}'
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_LONGEST_TAIL = 64
"""How many ids at the end of a prompt are searched for the start or end of reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Ids that open the reply without being sampled, and the grammar of what follows them."""

    forced_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallForm:
    """The text around a call's name and arguments, and between two calls."""

    before_name: str
    before_arguments: str
    end: str
    separator: str


class ReplyShaper:
    """Builds the constraint of a request, for one rendering."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._call_form: _CallForm | None = None
        self._is_form_known = False

    def constraint(self, completion: Completion, prompt: Ids) -> Constraint:
        """What the reply to `prompt` must be. Raises ApiError if this model cannot be made to do
        that.
        """
        request, tools = completion.fields, completion.tools
        choice = request.tool_choice
        if choice == "required" or isinstance(choice, NamedChoice):
            name = choice.function.name if isinstance(choice, NamedChoice) else None
            return self._call_constraint(name, tools, request.parallel_tool_calls is not False)
        if completion.shape is None:
            return Constraint()
        body = _shape_element(completion.shape)
        if tools and choice != "none":
            form = self._form()
            if form is None:
                raise unsupported(
                    "This model's tool calls cannot be combined with a form of the answer "
                    "('response_format', 'regex', ...); send 'tool_choice' = \"none\" with it.",
                    "response_format",
                )
            calls = self._calls(form, tools, request.parallel_tool_calls is not False)
            body = {"type": "or", "elements": [body, calls]}
        return Constraint(grammar=_tag(_sequence([*self._reasoning(prompt), body])))

    def call_end_id(self) -> int:
        """The token after which there would be a second call. Raises ApiError if there is none."""
        if self._rendering.tool_call_end_id is None:
            raise unsupported(
                "This model's calls have no end token: 'parallel_tool_calls' = false is not "
                "supported.",
                "parallel_tool_calls",
            )
        return self._rendering.tool_call_end_id

    def _call_constraint(
        self, name: str | None, tools: Sequence[Element], is_parallel: bool
    ) -> Constraint:
        form = self._form()
        if form is None:
            return Constraint(forced_ids=tuple(self._opening(name)))
        callable_tools = [tool for tool in tools if name in (None, tool["function"]["name"])]
        # One call of the named function, as in OpenAI's API.
        calls = self._calls(form, callable_tools, is_parallel and name is None)
        first = calls["elements"][0]
        assert first["type"] == "token"
        rest = _sequence(calls["elements"][1:])
        return Constraint(forced_ids=(first["token"],), grammar=_tag(rest))

    def _calls(self, form: _CallForm, tools: Sequence[Element], is_parallel: bool) -> Element:
        """One call of one of `tools`, or several; the first element is the token that opens it."""
        start, opening = self._pieces(form.before_name)
        bodies = [_call_body(opening["value"], form, tool["function"]) for tool in tools]
        body = bodies[0] if len(bodies) == 1 else {"type": "or", "elements": bodies}
        end = self._pieces(form.end)
        elements = [start, body, *end]
        if is_parallel:
            more = [*self._pieces(form.separator), start, body, *end]
            elements.append({"type": "star", "content": _sequence(more)})
        return _sequence(elements)

    def _reasoning(self, prompt: Ids) -> list[Element]:
        """What may come before the answer: reasoning, if the prompt leaves room for it."""
        start, end = self._rendering.reasoning_start_id, self._rendering.reasoning_end_id
        if start is None or end is None:
            return []
        tail = prompt[-_LONGEST_TAIL:].tolist()
        last_start = max((at for at, token in enumerate(tail) if token == start), default=-1)
        last_end = max((at for at, token in enumerate(tail) if token == end), default=-1)
        if last_end > last_start:
            return []
        inside = [
            {"type": "any_tokens", "exclude_tokens": [start, end, *self._rendering.stop_token_ids]},
            {"type": "token", "token": end},
            {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}},
        ]
        if last_start >= 0:
            return inside
        return [
            {"type": "optional", "content": _sequence([{"type": "token", "token": start}, *inside])}
        ]

    def _pieces(self, text: str) -> list[Element]:
        """`text` with its structural tokens by id."""
        ids = self._rendering.tokenizer.encode(text, add_special_tokens=False)
        pieces: list[Element] = []
        plain: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self._rendering.control_ids:
                plain.append(token)
                continue
            if plain:
                pieces.append({"type": "const_string", "value": self._rendering.decode(plain)})
                plain = []
            if token is not None:
                pieces.append({"type": "token", "token": token})
        return pieces

    def _form(self) -> _CallForm | None:
        if not self._is_form_known:
            self._call_form = self._read_form()
            self._is_form_known = True
        return self._call_form

    def _read_form(self) -> _CallForm | None:
        """How this family writes calls; None unless it is a JSON object between two markers."""
        marker = self._marker()
        try:
            text = self._example(_EXAMPLES, _EXAMPLE_ARGUMENTS)
        except ValueError:  # a template that allows at most one call in a message
            return None
        parts = text.split(_EXAMPLE_ARGUMENTS)
        if not marker or len(parts) != 3:
            return None
        head, found_first, before_arguments = parts[0].rpartition(_EXAMPLES[0])
        middle, found_second, again = parts[1].rpartition(_EXAMPLES[1])
        start = head.rfind(marker)
        stops = [self._rendering.decode([token]) for token in self._rendering.stop_token_ids]
        end = min((at for stop in stops if (at := parts[2].find(stop)) >= 0), default=-1)
        if not (found_first and found_second and start >= 0 and end > 0):
            return None
        before_name, last_end = head[start:], parts[2][:end]
        if before_arguments != again or not middle.endswith(before_name):
            return None
        between = middle.removesuffix(before_name)
        kinds = [piece["type"] for piece in self._pieces(before_name)]
        if not between.startswith(last_end) or kinds != ["token", "const_string"]:
            return None
        separator = between.removeprefix(last_end)
        return _CallForm(
            before_name=before_name,
            before_arguments=before_arguments,
            end=last_end,
            separator=separator,
        )

    def _opening(self, name: str | None) -> list[int]:
        """The ids of a call up to its function's name, or up to its arguments."""
        marker = self._marker()
        text = self._example((name or _EXAMPLES[0],), "{}")
        _, found, block = text.rpartition(marker) if marker else ("", "", "")
        if not found:
            raise unsupported(
                "This model cannot be made to call a tool: its tokenizer or its chat template has "
                "no mark that begins a call. Send 'tool_choice': 'auto'.",
                "tool_choice",
            )
        opening = marker + block[: len(block) - len(block.lstrip())]
        if name is not None:
            before, found, _ = block.partition("{}")
            if not found or name not in before:
                raise unsupported("This model cannot be made to call a named tool.", "tool_choice")
            opening = marker + before.rstrip()
        return self._rendering.tokenizer.encode(opening, add_special_tokens=False)

    def _marker(self) -> str:
        start_id = self._rendering.tool_call_start_id
        return "" if start_id is None else self._rendering.decode([start_id])

    def _example(self, names: Sequence[str], arguments: str) -> str:
        """The text of a conversation in which functions of these names are called."""
        calls = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, name in enumerate(names)
        ]
        example = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        return self._rendering.decode(self._rendering.prompt_ids(example, []))


def _shape_element(shape: Shape) -> Element:
    if shape.schema is not None:
        return {"type": "json_schema", "json_schema": shape.schema}
    if shape.regex is not None:
        return {"type": "regex", "pattern": shape.regex}
    choices = [{"type": "const_string", "value": choice} for choice in shape.choices]
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}


def _call_body(opening: str, form: _CallForm, function: Element) -> Element:
    """Name and arguments of a call of `function`."""
    name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
    head = opening + name + form.before_arguments
    parameters = function.get("parameters") or _NO_ARGUMENTS
    return _sequence(
        [
            {"type": "const_string", "value": head},
            {"type": "json_schema", "json_schema": parameters},
        ]
    )


def _sequence(elements: list[Element]) -> Element:
    return {"type": "sequence", "elements": elements}


def _tag(element: Element) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": element}, ensure_ascii=False)
    return Grammar(kind="structural_tag", text=text)
