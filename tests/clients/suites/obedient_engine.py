"""An engine that does what it is asked, without a model: for suites that try every form of an
answer, where the lab's model would write nonsense.

Under a grammar it says the shortest text that the grammar knows; otherwise it calls the first tool
once after each message of the user, with made-up arguments, and then says a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from transformers import AutoTokenizer

from records.types import Ids
from rollout_bridge.embedded.model.grammar import GrammarCompiler
from rollout_bridge.engine.types import GenerationChunk, SamplingParams
from rollout_bridge.rendering.rendering import Rendering
from tests.api_proxy.scripted_engine import Line, ScriptedEngine

SENTENCE = "Hello. It is twenty degrees in that city, and the sun shines."
Schema = dict[str, Any]


class ObedientEngine(ScriptedEngine):
    """Its reply follows from the prompt's text and the grammar alone."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(context_length=100_000)
        self._rendering = rendering
        stops = frozenset(rendering.stop_token_ids)
        # As the embedded engine loads it: grammars do not read the rendering's own kind.
        tokenizer = AutoTokenizer.from_pretrained(rendering.tokenizer.name_or_path)
        self._compiler = GrammarCompiler(tokenizer, rendering.vocab_size, stops, max_bytes=2**20)

    def next_line(self, input_ids: Ids, params: SamplingParams) -> Line:
        prompt = self._rendering.tokenizer.decode(list(map(int, input_ids)))
        if params.grammar is not None:
            format = json.loads(params.grammar.text)["format"]
            ids = self._encode(self._shortest(format, quoted(prompt)))
        else:
            ids = self._encode(reply_to(prompt))
        ids.append(self._rendering.stop_token_ids[0])
        is_cut = len(ids) > params.max_new_tokens
        return Line(
            ids=ids[: params.max_new_tokens], finish_reason="length" if is_cut else "stop", chunk=4
        )

    def _encode(self, text: str) -> list[int]:
        return self._rendering.tokenizer.encode(text, add_special_tokens=False)

    def _shortest(self, element: Schema, words: list[str]) -> str:
        """A short text that one element of a structural tag allows."""
        match element["type"]:
            case "const_string":
                return element["value"]
            case "token":
                return self._rendering.tokenizer.decode([element["token"]])
            case "json_schema":
                schema = element["json_schema"]
                return json.dumps(instance(schema, schema, words), ensure_ascii=False)
            case "sequence":
                return "".join(self._shortest(part, words) for part in element["elements"])
            case "or":
                return self._shortest(element["elements"][0], words)
            case "plus":
                return self._shortest(element["content"], words)
            case "optional" | "star" | "any_tokens":
                return ""
        raise AssertionError(element)

    async def stream(
        self,
        input_ids: Ids,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        cache_key: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """What is said, each token of it taken by the real grammar."""
        grammar = params.grammar
        matcher = None
        if grammar is not None:
            matcher = await self._compiler.matcher(grammar.kind, grammar.text)
        async with aclosing(super().stream(input_ids, params, request_id=request_id)) as chunks:
            async for chunk in chunks:
                if matcher is not None:
                    troubles = [matcher.take(token_id) for token_id in chunk.new_ids]
                    assert not any(troubles), f"{grammar} refuses {chunk.new_ids}: {troubles}"
                yield chunk


def reply_to(prompt: str) -> str:
    """A call of the first tool, or the sentence if there is none or it was called already."""
    _, _, since_user = prompt.rpartition("<|im_start|>user")
    offered = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    if offered is None or "<tool_response>" in since_user:
        return SENTENCE
    function = json.loads(offered[1].split("\n")[0])["function"]
    schema = function.get("parameters") or {}
    arguments = instance(schema, schema, quoted(prompt))
    said = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def quoted(prompt: str) -> list[str]:
    """What the last message of the user holds between single quotes."""
    return re.findall(r"'([^']+)'", prompt.rpartition("<|im_start|>user")[2].split("<|im_end|>")[0])


def instance(schema: Schema, root: Schema, words: list[str]) -> Any:
    """A value that fits the schema, with what it requires and no more. `words` are what a text says
    and what an object of any shape has as its keys.
    """
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return instance(target, root, words)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return instance(schema[word][0], root, words)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "string":
            return words[0] if words else "Paris"
        case "integer":
            return schema.get("minimum", 3)
        case "number":
            return 3.5
        case "boolean":
            return True
        case "array":
            return [instance(schema.get("items", {"type": "string"}), root, words)]
        case "null":
            return None
    if "properties" not in schema:
        return dict.fromkeys(words, "Paris")
    required = schema.get("required", ())
    return {name: instance(schema["properties"][name], root, words) for name in required}
