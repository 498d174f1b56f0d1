"""Prompts of the embedded engine as token ids: what the chat template makes of messages, or a text.

A long one is rendered in a thread, so that the routes go on meanwhile; one that cannot fit in the
context is refused before it is rendered. Control texts inside content, names, tools and arguments
become ordinary ids that spell them, as in the prompts of the endpoint (`control_text`); the text
of `/generate` is taken as it is. It knows no HTTP and no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec

import jinja2
import orjson

from records.messages import Message, content_text, parsed_arguments
from rollout_bridge.embedded.errors import BadRequest
from rollout_bridge.rendering.content_tokenizer import ContentTokenizer
from rollout_bridge.rendering.control_text import ControlTexts
from rollout_bridge.rendering.templates.errors import Unrenderable
from rollout_bridge.rendering.templates.traits import TemplateTraits
from rollout_bridge.rendering.tokenizer import control_texts

Given = ParamSpec("Given")

_NUM_THREADS = 2
_OFFLOAD_BYTES = 16_384
"""Longer input is rendered in a thread."""
_BYTES_PER_TOKEN = 16
_LEAST_BYTES = 16_384
"""Input up to this size is rendered, however short the context is."""


class Prompts:
    """Renders and encodes for one model."""

    def __init__(self, tokenizer: Any, model: str, context_length: int):
        self._tokenizer = tokenizer
        self._model = model
        self._context_length = context_length
        self._content_tokenizer = ContentTokenizer(tokenizer)
        self._traits = TemplateTraits(tokenizer)
        self._content = ControlTexts(control_texts(tokenizer))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompt")

    async def of_text(self, text: str) -> list[int]:
        """The tokenizer's ids of a text. Raises BadRequest if it cannot fit."""
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        self._check(num_bytes)
        return await self._run(num_bytes, self._tokenizer.encode, text)

    async def of_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: dict[str, Any],
    ) -> list[int]:
        """Ids of a conversation up to the reply. Raises BadRequest if there are none."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise BadRequest(
                f"the model '{self._model}' has no chat template; send token ids to /generate"
            )
        try:
            num_bytes = len(orjson.dumps([messages, tools]))
        except TypeError:
            raise BadRequest("the messages or tools are nested too deeply") from None
        self._check(num_bytes)
        return await self._run(num_bytes, self._rendered, messages, tools, variables)

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, num_bytes: int) -> None:
        most = max(self._context_length * _BYTES_PER_TOKEN, _LEAST_BYTES)
        if num_bytes > most:
            raise BadRequest(
                f"The input ({num_bytes} bytes) is longer than the model's context length "
                f"({self._context_length} tokens): at most {most} bytes are read."
            )

    async def _run(
        self,
        num_bytes: int,
        function: Callable[Given, list[int]],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> list[int]:
        if num_bytes <= _OFFLOAD_BYTES:
            return function(*args, **kwargs)
        return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: dict[str, Any],
    ) -> list[int]:
        shaped = _template_messages(messages)
        for message in shaped:
            if self._content.stand_in(message["role"]):
                raise BadRequest("the role of a message contains a control text of the model")
        try:
            shaped = self._traits.shaped(shaped, tools)
            ids = self._content_tokenizer.apply_chat_template(
                self._content.broken_messages(shaped),
                tools=None if tools is None else self._content.broken_value(list(tools)),
                add_generation_prompt=True,
                **variables,
            )
        except Unrenderable as error:
            raise BadRequest(str(error)) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the chat template cannot render these messages: {error}") from None
        if not ids:
            raise BadRequest("the chat template rendered nothing")
        return list(ids)


def _template_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: text content, arguments of tool calls as objects.

    Raises BadRequest for messages that are not OpenAI's.
    """
    prepared = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise BadRequest("every message needs a role")
        try:
            text = content_text(message.get("content"))
            calls = [_template_call(call) for call in message.get("tool_calls") or ()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"malformed {message['role']} message: {error}") from None
        prepared.append({**message, "content": text})
        if calls:
            prepared[-1]["tool_calls"] = calls
    return prepared


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parsed_arguments(function.get("arguments"))
    return {**call, "function": {**function, "name": function["name"], "arguments": arguments}}
