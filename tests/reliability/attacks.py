"""Requests that cost as much as a request can, each with one thing of which there is too much.

Each is made for a number `n`, so that its cost can be compared with that of 2n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """`within` is a size that is answered; `beyond` one that is refused as `code`."""

    path: str
    body: Callable[[int], dict[str, Any]]
    within: int
    beyond: int
    code: str

    def raw(self, number: int) -> bytes:
        """The body of `number` things."""
        return orjson.dumps({"model": "policy", "max_tokens": 8, **self.body(number)})


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "description": "d"}}


def _chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, **fields}


def _calls(number: int) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(number)]
    results = [{"role": "tool", "tool_call_id": "c0", "content": "r"}]
    return [USER, {"role": "assistant", "tool_calls": calls}, *results]


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


def _with_arguments(*texts: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(texts)
    ]
    result = {"role": "tool", "tool_call_id": "c0", "content": "r"}
    return [USER, {"role": "assistant", "tool_calls": calls}, result]


def _schema(number: int) -> dict[str, Any]:
    fields = {f"field_{n}": {"type": "string"} for n in range(number)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"properties": fields}}}


_REPLY_ID = "msg_" + "0" * 32


def _pieces(number: int) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": "abc "}
    message = {"type": "message", "id": _REPLY_ID, "role": "assistant", "content": [part]}
    return [{"role": "user", "content": "hi"}, *[message] * number]


def _blocks(number: int) -> dict[str, Any]:
    results = [
        {"type": "tool_result", "tool_use_id": f"t{n}", "content": "r"} for n in range(number)
    ]
    return {"messages": [{"role": "user", "content": results}]}


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOO_MANY = "array_above_max_length"
TOO_LONG = "context_length_exceeded"

ATTACKS: dict[str, Attack] = {
    "tools": Attack(
        path=CHAT,
        body=lambda n: _chat([USER], tools=[_tool(number) for number in range(n)]),
        within=512,
        beyond=10_000,
        code=TOO_MANY,
    ),
    "messages": Attack(
        path=CHAT, body=lambda n: _chat([USER] * n), within=4096, beyond=20_000, code=TOO_MANY
    ),
    "turns": Attack(
        path=CHAT,
        body=lambda n: _chat([*[USER, {"role": "assistant", "content": "yes"}] * (n // 2), USER]),
        within=4095,
        beyond=20_000,
        code=TOO_MANY,
    ),
    "parts": Attack(
        path=CHAT,
        body=lambda n: _chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]),
        within=1024,
        beyond=20_000,
        code=TOO_MANY,
    ),
    "calls": Attack(
        path=CHAT, body=lambda n: _chat(_calls(n)), within=256, beyond=10_000, code=TOO_MANY
    ),
    "characters": Attack(
        path=CHAT,
        body=lambda n: _chat([{"role": "user", "content": "lo rem ip" * n}]),
        within=10_000,
        beyond=3_000_000,
        code=TOO_LONG,
    ),
    "one long word": Attack(
        path=CHAT,
        body=lambda n: _chat([{"role": "user", "content": "a" * n}]),
        within=60_000,
        beyond=20_000_000,
        code=TOO_LONG,
    ),
    "a long description": Attack(
        path=CHAT,
        body=lambda n: _chat(
            [USER], tools=[{"type": "function", "function": {"name": "f", "description": "a " * n}}]
        ),
        within=50_000,
        beyond=8_000_000,
        code=TOO_LONG,
    ),
    "nesting": Attack(
        path=CHAT,
        body=lambda n: _chat(
            [USER],
            tools=[{"type": "function", "function": {"name": "f", "parameters": _nested(n)}}],
        ),
        within=40,
        beyond=110,
        code="invalid_value",
    ),
    "arguments": Attack(
        path=CHAT,
        body=lambda n: _chat(_with_arguments("[" + "[]," * n + "1]")),
        within=40_000,
        beyond=150_000,
        code="invalid_value",
    ),
    "arguments of many calls": Attack(
        path=CHAT,
        body=lambda n: _chat(_with_arguments(*["[" + "[]," * (n // 9) + "1]"] * 9)),
        within=40_000,
        beyond=280_000,
        code="invalid_value",
    ),
    "quotes in arguments": Attack(
        path=CHAT,
        body=lambda n: _chat(_with_arguments("[]" * 201 + '"' + '\\"' * n)),
        within=8_000,
        beyond=400_000,
        code=TOO_LONG,
    ),
    "unknown fields": Attack(
        path=CHAT,
        body=lambda n: _chat([USER], more=[[]] * n),
        within=45_000,
        beyond=3_000_000,
        code="request_too_large",
    ),
    "biases": Attack(
        path=CHAT,
        body=lambda n: _chat([USER], logit_bias={str(token): 1 for token in range(n)}),
        within=200,
        beyond=40_000,
        code="object_above_max_properties",
    ),
    "metadata": Attack(
        path=CHAT,
        body=lambda n: _chat([USER], metadata={f"k{number}": "v" for number in range(n)}),
        within=16,
        beyond=40_000,
        code="object_above_max_properties",
    ),
    "a schema": Attack(
        path=CHAT,
        body=lambda n: _chat([USER], response_format=_schema(n)),
        within=3_000,
        beyond=20_000,
        code="invalid_value",
    ),
    "faults": Attack(
        path=CHAT,
        body=lambda n: _chat([{"role": "user", "content": [{"type": 1}] * 1000}] * n),
        within=0,
        beyond=40,
        code="invalid_value",
    ),
    "blocks": Attack(path=MESSAGES, body=_blocks, within=1024, beyond=20_000, code=TOO_MANY),
    "blocks that are tools": Attack(
        path=MESSAGES,
        body=lambda n: {
            "messages": [USER],
            "tools": [{"name": f"f{m}", "input_schema": {}} for m in range(n)],
        },
        within=512,
        beyond=20_000,
        code=TOO_MANY,
    ),
    "pieces of one reply": Attack(
        path=RESPONSES,
        body=lambda n: {"input": _pieces(n), "max_tokens": None, "max_output_tokens": 8},
        within=8_000,
        beyond=17_000,
        code="request_too_large",
    ),
    "namespaces": Attack(
        path=RESPONSES,
        body=lambda n: {
            "input": "hi",
            "tools": [
                {"type": "namespace", "name": f"n{m}", "tools": [{"name": f"f{m}"}]}
                for m in range(n)
            ],
        },
        within=256,
        beyond=10_000,
        code=TOO_MANY,
    ),
    "metadata that is repeated": Attack(
        path=RESPONSES,
        body=lambda n: {"input": "hi", "metadata": {"a": "x" * n}},
        within=512,
        beyond=8_000_000,
        code="string_above_max_length",
    ),
    "ids": Attack(
        path="/v1/completions",
        body=lambda n: {"prompt": [5] * n},
        within=100_000,
        beyond=1_000_000,
        code="request_too_large",
    ),
}
