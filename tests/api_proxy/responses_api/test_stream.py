"""The events of a streamed response: their order, their numbers, and the items that they make."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from api_proxy.errors import engine_unavailable
from api_proxy.reply.formats import EndedReply, num_reasoning_tokens
from api_proxy.reply.reply import CallDelta, Delta, Reply, SentCall
from api_proxy.reply.wire import Usage
from api_proxy.responses_api.items import reply_items
from api_proxy.responses_api.reply import Head, page_of
from api_proxy.responses_api.stream import ResponseStream

TURN = "a" * 32
HEAD = Head(turn_id=TURN, model="policy", instructions=None, tools=[], echo={"created_at": 1})
ENTRY = {"token": "Yes", "logprob": -0.5, "bytes": [89], "top_logprobs": []}


def ended(reply: Reply, reason: str = "stop") -> EndedReply:
    return EndedReply(
        reply=reply,
        reason=reason,
        matched_stop=None,
        usage=Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=6),
        num_reasoning_tokens=2,
        logprobs=None,
    )


def parsed(raw: bytes) -> list[dict]:
    """The data of events, whose names must be the types in them and whose numbers must count."""
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(
        range(events[0]["sequence_number"], events[0]["sequence_number"] + len(events))
    )
    return events


WHOLE = Reply(
    content="Yes.",
    reasoning="hm",
    tool_calls=(
        SentCall(id="call_0", name="look", arguments='{"x": 1}'),
        SentCall(id="call_1", name="look", arguments=""),
    ),
)
DELTAS = [
    Delta(reasoning="h"),
    Delta(reasoning="m"),
    Delta(content="Ye"),
    Delta(content="s."),
    Delta(call=CallDelta(index=0, id="call_0", name="look")),
    Delta(call=CallDelta(index=0, arguments='{"x"')),
    Delta(call=CallDelta(index=0, arguments=": 1}")),
    Delta(call=CallDelta(index=1, id="call_1", name="look")),
]


def streamed(deltas: list[Delta], reply: Reply, reason: str = "stop") -> list[dict]:
    stream = ResponseStream(HEAD)
    raw = stream.start() + b"".join(stream.delta(delta) for delta in deltas)
    return parsed(raw + stream.end(ended(reply, reason)))


def test_events_of_a_reply_with_every_kind_of_item() -> None:
    events = streamed(DELTAS, WHOLE)
    kinds = [event["type"].removeprefix("response.") for event in events]
    text_item = ["output_item.added", "content_part.added", "{}.delta", "{}.delta", "{}.done"]
    text_item += ["content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    assert kinds == [
        "created",
        "in_progress",
        *[kind.format("reasoning_text") for kind in text_item],
        *[kind.format("output_text") for kind in text_item],
        "output_item.added",
        f"{arguments}.delta",
        f"{arguments}.delta",
        f"{arguments}.done",
        "output_item.done",
        "output_item.added",
        f"{arguments}.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1]["response"]
    assert last["output"] == reply_items(TURN, WHOLE.message(), "completed")
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)


def test_the_official_types_take_every_event() -> None:
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in streamed(DELTAS, WHOLE):
        assert adapter.validate_python(event).type == event["type"]


def test_a_cut_reply_is_incomplete() -> None:
    reply = Reply(content="Ye", reasoning=None, tool_calls=())
    events = streamed([Delta(content="Ye")], reply, "length")
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    call = Delta(call=CallDelta(index=0, id="call_0", name="look"))
    events = streamed([Delta(content="A"), call, Delta(content="\nB")], WHOLE)
    ids = [item["id"] for item in events[-1]["response"]["output"]]
    assert ids == [f"msg_{TURN}", f"fc_{TURN}_0", f"msg_{TURN}_1"]


def test_logprobs_stand_with_their_text() -> None:
    stream = ResponseStream(HEAD)
    stream.delta(Delta(content="Yes"), [ENTRY])
    events = parsed(stream.end(ended(Reply(content="Yes", reasoning=None, tool_calls=()))))
    assert events[0]["logprobs"] == [ENTRY]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [ENTRY]


def test_a_failure_may_be_the_whole_stream() -> None:
    events = parsed(ResponseStream(HEAD).error(engine_unavailable(2)))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


def test_a_failure_ends_the_stream() -> None:
    stream = ResponseStream(HEAD)
    stream.start()
    (event,) = parsed(stream.error(engine_unavailable(2)))
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("reasoning", "end_id", "count"), [(None, 9, 0), ("hm", 9, 3), ("hm", 7, 5), ("hm", None, 0)]
)
def test_reasoning_tokens(reasoning: str | None, end_id: int | None, count: int) -> None:
    assert num_reasoning_tokens([1, 2, 9, 3, 4], reasoning, end_id) == count


def test_pages() -> None:
    items = [{"id": str(number)} for number in range(5)]
    page = page_of(items, 2, "asc", "1")
    assert page is not None
    assert [item["id"] for item in page["data"]] == ["2", "3"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("2", "3", True)
    newest = page_of(items, 10, "desc", None)
    assert newest is not None
    assert [item["id"] for item in newest["data"]] == ["4", "3", "2", "1", "0"]
    assert newest["has_more"] is False
    assert page_of(items, 2, "asc", "x") is None
