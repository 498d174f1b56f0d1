"""Replies in Anthropic's words: blocks, stop reasons, the order of a stream's events."""

from __future__ import annotations

import json

import pytest

from api_proxy.errors import engine_unavailable, invalid
from api_proxy.messages_api.errors import refusal
from api_proxy.messages_api.reply import content_blocks, message_body, stop_fields
from api_proxy.messages_api.request import UNPARSED_ARGUMENTS
from api_proxy.messages_api.stream import MessageStream
from api_proxy.reply.formats import EndedReply
from api_proxy.reply.reply import CallDelta, Delta, Reply, SentCall
from api_proxy.reply.wire import Usage

CALL = SentCall(id="call_1", name="look", arguments='{"x": 1}')
BROKEN = SentCall(id="call_2", name="look", arguments="{oops")


def ended(
    content: str = "",
    *calls: SentCall,
    reason: str = "stop",
    matched_stop: str | None = None,
    reasoning: str | None = None,
) -> EndedReply:
    return EndedReply(
        reply=Reply(content=content, reasoning=reasoning, tool_calls=calls),
        reason=reason,
        matched_stop=matched_stop,
        usage=Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=6),
        num_reasoning_tokens=2,
        logprobs=None,
    )


def pieces(index: int, call: SentCall) -> list[Delta]:
    """A call as it streams: its name, then its arguments."""
    half = len(call.arguments) // 2
    return [
        Delta(call=CallDelta(index=index, id=call.id, name=call.name)),
        Delta(call=CallDelta(index=index, arguments=call.arguments[:half])),
        Delta(call=CallDelta(index=index, arguments=call.arguments[half:])),
    ]


def parsed(raw: bytes) -> list[dict]:
    """The data of events, whose names must be the types in them."""
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_whole_message() -> None:
    body = message_body("t", "policy", ended("Yes.", CALL, reasoning="hm"))
    assert body == {
        "id": "msg_t",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "t"},
            {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "call_1", "name": "look", "input": {"x": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": 6,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    "arguments", ["{oops", "[1]", '"x"', "", '{"x": NaN}', '{"x": 123456789012345678901234567890}']
)
def test_arguments_that_are_no_object_can_still_be_sent(arguments: str) -> None:
    reply = ended("", SentCall(id="a", name="look", arguments=arguments)).reply
    (block,) = content_blocks("t", reply)
    assert block["input"] == {UNPARSED_ARGUMENTS: arguments}


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (ended("a"), "end_turn", None),
        (ended("a", CALL), "tool_use", None),
        (ended("a", CALL, reason="length"), "max_tokens", None),
        (ended("a", matched_stop="END"), "stop_sequence", "END"),
    ],
)
def test_stop_reasons(reply: EndedReply, reason: str, sequence: str | None) -> None:
    assert stop_fields(reply) == {"stop_reason": reason, "stop_sequence": sequence}


def test_events_of_a_reply_with_every_kind_of_block() -> None:
    stream = MessageStream("t", "policy", 10)
    raw = stream.start()
    raw += stream.delta(Delta(reasoning="h")) + stream.delta(Delta(reasoning="m"))
    raw += stream.delta(Delta(content="Ye")) + stream.delta(Delta(content="s."))
    for delta in (*pieces(0, CALL), *pieces(1, BROKEN)):
        raw += stream.delta(delta)
    raw += stream.end(ended("Yes.", CALL, BROKEN, reasoning="hm"))
    events = parsed(raw)
    assert [
        (event["type"].removeprefix("content_block_"), event.get("index")) for event in events
    ] == [
        ("message_start", None),
        *[(kind, 0) for kind in ("start", "delta", "delta", "delta", "stop")],
        *[(kind, 1) for kind in ("start", "delta", "delta", "stop")],
        *[(kind, 2) for kind in ("start", "delta", "stop")],
        *[(kind, 3) for kind in ("start", "delta", "stop")],
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0]["message"]["usage"] == {"input_tokens": 10, "output_tokens": 0}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[2] == {"type": "signature_delta", "signature": "t"}
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    assert inputs == [{"x": 1}, {UNPARSED_ARGUMENTS: "{oops"}]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["cache_read_input_tokens"] == 6


def test_a_call_is_sent_when_it_is_whole() -> None:
    stream = MessageStream("t", "policy", 10)
    assert b"".join(stream.delta(delta) for delta in pieces(0, CALL)) == b""
    (begin, delta, _, _, _) = parsed(stream.end(ended("", CALL)))
    block = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    assert begin["content_block"] == block
    assert delta["delta"]["partial_json"] == CALL.arguments


def test_errors_have_anthropics_shape() -> None:
    status, body = refusal(invalid("bad", "messages"))
    assert (status, body) == (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "bad"}},
    )
    status, body = refusal(engine_unavailable(2))
    assert (status, body["error"]["type"]) == (529, "overloaded_error")
    (event,) = parsed(MessageStream("t", "policy", 1).error(engine_unavailable(2)))
    assert event["error"]["type"] == "overloaded_error"
