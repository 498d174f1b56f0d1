"""Messages to token ids and back: the only module that knows the package `renderers`.

A `Rendering` belongs to one tokenizer and one configured renderer. It renders a conversation into
the prompt's ids, extends an earlier prompt and the reply sampled under it by new messages without
tokenising the sampled ids again, and parses sampled ids into text, reasoning and tool calls. It
knows no engines, turns or sessions. `renderer_package` describes how `renderers` is imported.

Prompts are what the chat template makes of the messages, except that control texts inside content,
names, tools and arguments become ordinary ids that spell them (`control_text`): only the template
writes a prompt's structure. A `Rendering` may be used from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from records.messages import Message
from records.types import Ids
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.call_text import read_call
from rollout_bridge.rendering.control_text import ControlTexts, unbroken
from rollout_bridge.rendering.parsed_reply import (
    ParsedCall,
    ParsedReply,
    is_object,
    name_and_arguments,
)
from rollout_bridge.rendering.renderer_package import (
    check_tool_parser,
    make_renderer,
    needs_offsets,
    package_config,
)
from rollout_bridge.rendering.stop_ids import model_stop_ids
from rollout_bridge.rendering.templates.errors import TemplateErrors
from rollout_bridge.rendering.templates.messages import template_messages
from rollout_bridge.rendering.templates.traits import TemplateTraits
from rollout_bridge.rendering.tokenizer import control_texts, load_tokenizer

Tools = Sequence[dict[str, Any]]

# How families open a block of tool calls, as one token; the first that the tokenizer knows is used.
_TOOL_CALL_STARTS = (
    "<tool_call>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<minimax:tool_call>",
    "<|tool_call>",
    "<|python_tag|>",
)
# How they close one call; if several calls share a block, this is the end of the first.
_TOOL_CALL_ENDS = (
    "</tool_call>",
    "<|tool_call_end|>",
    "<｜tool▁call▁end｜>",
    "<tool_call|>",
)

MOST_SYSTEM_MESSAGES = 32
"""Most system messages of a prompt for which origins of ids are determined, in families that search
all of them for each id: DeepSeek V4 takes 0.2 s for 800, and four times as long for twice as many.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A fresh render with generation prompt: `ids` [P] and, if the renderer knows it, the origin of
    each id.

    `message_indices` [P] is the index of the message an id belongs to (-1: none); `is_sampled` [P]
    marks ids that the policy would have sampled. Both are None for a renderer that only sees the
    template's output (`default`), and for one that looks at offsets in a prompt of more than
    MOST_SYSTEM_MESSAGES system messages.
    """

    ids: Ids
    message_indices: np.ndarray | None
    is_sampled: np.ndarray | None


class Rendering:
    """One tokenizer and its renderer; made by `load`."""

    def __init__(
        self, tokenizer: Any, renderer: Any, attributing: Any, stop_ids: tuple[int, ...]
    ) -> None:
        """`attributing` is `renderer`, or one like it that tells more about where ids come from;
        `stop_ids` end a reply according to the model, whatever the renderer knows.
        """
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._attributing = attributing
        self.template_only = type(renderer).__name__ == "DefaultRenderer"
        # A renderer of a family knows what its template shows.
        extra = renderer.config.model_extra
        self.traits = TemplateTraits(tokenizer, extra) if self.template_only else None
        self.vocab_size = len(tokenizer)
        self._known_stops = frozenset(renderer.get_stop_token_ids())
        stops = dict.fromkeys((*renderer.get_stop_token_ids(), *stop_ids))
        self.stop_token_ids: tuple[int, ...] = tuple(stops)
        self.tool_call_start_id = self._first_marker_id(_TOOL_CALL_STARTS)
        self.tool_call_end_id = self._first_marker_id(_TOOL_CALL_ENDS)
        self.reasoning_start_id = self._first_marker_id(("<think>",))
        self.reasoning_end_id = self._first_marker_id(("</think>",))
        self._by_thinking: dict[bool, Rendering] = {}

    @classmethod
    def load(cls, model: str, config: RendererConfig) -> Rendering:
        """Tokenizer of `model` (local folder or hub id) under the configured renderer.

        Raises ValueError, in one line, on an unknown renderer, a setting that it does not have, a
        model without tokenizer, a parser of calls that the tokenizer has no tokens for, or
        `default` on a tokenizer without chat template.
        """
        renderer_config = package_config(config)
        try:
            tokenizer = load_tokenizer(model)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"cannot load a tokenizer from {model!r}: {reason}") from error
        if config.name == "default" and not tokenizer.chat_template:
            raise ValueError(
                f"model {model!r} has no chat template: add a chat_template.jinja to it, "
                f"or set renderer.name to its family instead of 'default'"
            )
        check_tool_parser(tokenizer, config.tool_parser)
        try:
            renderers = _renderers(tokenizer, renderer_config)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"renderer {config.name!r} does not fit the tokenizer of {model!r}: {error}; set "
                "renderer.name to the model's family, or to 'default' (its own template)"
            ) from error
        return cls(tokenizer, *renderers, model_stop_ids(model, tokenizer))

    def with_thinking(self, enable_thinking: bool | None) -> Rendering:
        """This rendering with the chat template's switch set; None leaves it as it is.

        Raises ValueError if the model's template has no such switch.
        """
        if enable_thinking is None:
            return self
        known = self._by_thinking.get(enable_thinking)
        if known is None:
            renderers = self._renderers_with_thinking(enable_thinking)
            known = Rendering(self.tokenizer, *renderers, self.stop_token_ids)
            self._by_thinking[enable_thinking] = known
        return known

    def _renderers_with_thinking(self, enable_thinking: bool) -> tuple[Any, Any]:
        config = self._renderer.config
        if self.template_only:
            has_switch = "enable_thinking" in str(self.tokenizer.chat_template)
        else:
            has_switch = "enable_thinking" in type(config).model_fields
        if not has_switch:
            raise ValueError("this model's chat template has no switch 'enable_thinking'")
        values = {name: getattr(config, name) for name in config.model_fields_set}
        values |= {**(config.model_extra or {}), "enable_thinking": enable_thinking}
        return _renderers(self.tokenizer, type(config)(**values))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The prompt's ids [P], generation prompt included, as the chat template gives them.

        Raises ValueError when the template cannot render these messages.
        """
        with TemplateErrors():
            ids = self._renderer.render_ids(
                self._shown(messages, tools),
                tools=self._shown_tools(tools),
                add_generation_prompt=True,
            )
        return np.asarray(ids, dtype=np.int32)

    def rendered_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> RenderedPrompt:
        """`prompt_ids` with the origin of each id, if the renderer can tell."""
        if self.template_only or self._tells_origins_slowly(messages):
            # For a template it is a guess from rendering every prefix, and costs as many renders.
            return RenderedPrompt(
                ids=self.prompt_ids(messages, tools), message_indices=None, is_sampled=None
            )
        with TemplateErrors():
            rendered = self._attributing.render(
                self._shown(messages), tools=self._shown_tools(tools), add_generation_prompt=True
            )
        has_origin = len(rendered.sampled_mask) == len(rendered.token_ids)
        return RenderedPrompt(
            ids=np.asarray(rendered.token_ids, dtype=np.int32),
            message_indices=np.asarray(rendered.message_indices) if has_origin else None,
            is_sampled=np.asarray(rendered.sampled_mask, dtype=bool) if has_origin else None,
        )

    def _tells_origins_slowly(self, messages: Sequence[Message]) -> bool:
        """Families that tell origins from offsets search all system messages for each id."""
        if self._attributing is self._renderer:
            return False
        num_system = sum(one.get("role") in ("system", "developer") for one in messages)
        return num_system > MOST_SYSTEM_MESSAGES

    def extend(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> Ids | None:
        """The next prompt [P']: `prompt_ids` + `response_ids` + `new_messages` + generation prompt.

        The caller guarantees that the response was echoed as it was sent and that the tools are the
        same. None when the template does not allow this continuation (it strips earlier reasoning,
        a message is an assistant's, the reply ended with another token than the template's) or the
        renderer cannot know: then a full render is the prompt. The result always starts with the
        prompt and the sampled ids unchanged; a truncated reply then gets its missing end token.
        Raises ValueError when the template cannot render the new messages.
        """
        sampled = response_ids.tolist()
        if self.template_only or not sampled or not new_messages:
            return None
        if sampled[-1] in self.stop_token_ids and sampled[-1] not in self._template_end_ids:
            return None
        previous = prompt_ids.tolist()
        with TemplateErrors():
            bridged = self._renderer.bridge_to_next_turn(
                previous, sampled, self._shown(new_messages), tools=self._shown_tools(tools)
            )
        if bridged is None:
            return None
        num_previous = len(previous) + len(sampled)
        if bridged.token_ids[:num_previous] != previous + sampled:
            return None
        added = np.asarray(bridged.token_ids[num_previous:], dtype=np.int32)
        return np.concatenate([prompt_ids, response_ids, added]).astype(np.int32, copy=False)

    def recorded_response_ids(
        self,
        messages: Sequence[Message],
        response: Message,
        tools: Tools = (),
        prompt_ids: Ids | None = None,
    ) -> Ids:
        """The ids [R] that sampling `response` after `messages` would have given, stop token
        included: the one place where a response becomes ids, for recordings with text only.

        `prompt_ids` [P], if the caller has them, save rendering `messages` once more. Raises
        ValueError if the template does not show the response as a reply to this prompt.
        """
        with TemplateErrors():
            whole = list(
                self._renderer.render_ids(
                    self._shown([*messages, response], tools), tools=self._shown_tools(tools)
                )
            )
        prompt = None if prompt_ids is None else prompt_ids.tolist()
        if prompt is None or whole[: len(prompt)] != prompt:
            # Sampled ids may be other ids of the same text; then those of the fresh render count.
            prompt = self.prompt_ids(messages, tools).tolist()
        if whole[: len(prompt)] != prompt:
            raise ValueError("the template shows this prompt differently before a response")
        rest = whole[len(prompt) :]
        ends = [place for place, token in enumerate(rest) if token in self.stop_token_ids]
        if len(ends) != 1 or ends[0] == 0:
            raise ValueError(
                f"the template shows the response with {len(ends)} end tokens, not one"
                if ends != [0]
                else "the template shows an empty response"
            )
        return np.asarray(rest[: ends[0] + 1], dtype=np.int32)

    def parse(
        self, response_ids: Ids, tools: Tools = (), prompt_ids: Ids | None = None
    ) -> ParsedReply:
        """Text, reasoning and tool calls of sampled ids [R], which may end with a stop token.

        `prompt_ids` shows whether the prompt already opened the reasoning. Every attempted call is
        included, in order; malformed ones are not dropped.
        """
        ids = response_ids.tolist()
        if ids and ids[-1] in self.stop_token_ids and ids[-1] not in self._known_stops:
            ids.pop()
        parse = partial(
            self._renderer.parse_response,
            tools=list(tools) or None,
            prompt_ids=None if prompt_ids is None else prompt_ids.tolist(),
        )
        try:
            parsed = parse(ids)
            calls = [self._parsed_call(call, ids) for call in parsed.tool_calls]
        except (RecursionError, ValueError):
            # Python's JSON parser, which the package uses, raises these for a call whose brackets
            # nest a thousand deep or whose number has thousands of digits.
            before, calls = self._calls_by_markers(ids)
            parsed = parse(before)
        return ParsedReply(
            content=parsed.content, reasoning=parsed.reasoning_content, tool_calls=calls
        )

    def count_tokens(self, text: str) -> int:
        """Number of ids of a text, without any template around it."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """Text of `ids` with special tokens shown and nothing tidied."""
        return self.tokenizer.decode(
            ids.tolist() if isinstance(ids, np.ndarray) else list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def prompt_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The prompt as text, straight from the tokenizer's chat template (ValueError if it cannot
        render). A template-only renderer offers this in place of token origins.
        """
        with TemplateErrors():
            text = self.tokenizer.apply_chat_template(
                self._shown(messages, tools),
                tools=self._shown_tools(tools),
                add_generation_prompt=True,
                tokenize=False,
                **(self._renderer.config.model_extra or {}),
            )
        return unbroken(text)

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """Texts that become one structural token wherever the tokenizer finds them."""
        return control_texts(self.tokenizer)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of `control_texts`."""
        return frozenset(self.tokenizer.convert_tokens_to_ids(text) for text in self.control_texts)

    @cached_property
    def _content(self) -> ControlTexts:
        has_parser = not self.template_only or self._renderer.config.tool_parser is not None
        # If calls stay text, a reply's markers are those that were sampled.
        kept = () if has_parser else (*_TOOL_CALL_STARTS, *_TOOL_CALL_ENDS)
        # OpenAI's own encoder makes gpt-oss' ids, and would show a break.
        with_blanks = getattr(self._renderer.config, "name", None) == "gpt-oss"
        return ControlTexts(self.control_texts, kept, with_blanks=with_blanks)

    def _shown(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Messages for the template, with breaks in their control texts."""
        shaped = template_messages(messages)
        if self.traits is not None:
            shaped = self.traits.shaped(shaped, tools)
        return self._content.broken_messages(shaped)

    def _shown_tools(self, tools: Tools) -> list[dict[str, Any]] | None:
        given = list(tools)
        return (
            self._content.broken_value(given) if self._content.stand_in(given) else given
        ) or None

    def _first_marker_id(self, markers: Sequence[str]) -> int | None:
        for marker in markers:
            token_id = self.tokenizer.convert_tokens_to_ids(marker)
            if isinstance(token_id, int) and token_id != self.tokenizer.unk_token_id:
                return token_id
        return None

    @cached_property
    def _template_end_ids(self) -> frozenset[int]:
        """Stop tokens with which the template itself closes an assistant message in the history.

        A model may also stop at another one (Qwen: end of text), which no template would show.
        """
        rendered = self._renderer.render(
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        )
        return frozenset(
            token
            for token, index in zip(rendered.token_ids, rendered.message_indices, strict=True)
            if index == 1 and token in self.stop_token_ids
        )

    def _calls_by_markers(self, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
        """The ids before the first block of a call, and each block as a call."""
        starts = [place for place, token in enumerate(ids) if token == self.tool_call_start_id]
        calls = []
        for start, limit in zip(starts, [*starts[1:], len(ids)], strict=True):
            block = ids[start:limit]
            ends = [place for place, token in enumerate(block) if token == self.tool_call_end_id]
            if ends:
                block = block[: ends[0] + 1]
            name, arguments = read_call(self.decode(block[1:-1] if ends else block[1:])) or ("", "")
            calls.append(
                ParsedCall(
                    name=name,
                    arguments_json=arguments,
                    ok=bool(ends) and is_object(arguments),
                    raw=self.decode(block),
                    open_at=None if ends else start + 1,
                )
            )
        return ids[: starts[0]] if starts else ids, calls

    def _parsed_call(self, call: Any, ids: list[int]) -> ParsedCall:
        raw = call.raw if call.token_span is None else self.decode(ids[slice(*call.token_span)])
        open_at = None
        if call.token_span is not None and call.status.name == "UNCLOSED_BLOCK":
            open_at = call.token_span[0] + 1
        name, arguments_json, ok = name_and_arguments(call)
        return ParsedCall(name=name, arguments_json=arguments_json, ok=ok, raw=raw, open_at=open_at)


def _renderers(tokenizer: Any, config: Any) -> tuple[Any, Any]:
    """The renderer of `config`, and the one that tells most about where ids come from."""
    renderer = make_renderer(tokenizer, config)
    if config.name == "default" or not needs_offsets(renderer):
        return renderer, renderer
    return renderer, make_renderer(tokenizer, config, with_offsets=True)
