"""Input items into messages and back: replies are put together again wherever their items stand."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api_proxy.reply.reply import Reply, SentCall
from api_proxy.responses_api.items import input_items, messages_of, reply_items, turn_of_item
from api_proxy.responses_api.schemas import ResponsesRequest
from records.messages import canonical_message
from tests.messages import user

ONE, TWO = "a" * 32, "b" * 32


def messages(*items: dict[str, Any]) -> list[dict]:
    request = ResponsesRequest.model_validate({"model": "policy", "input": list(items)})
    return messages_of(request.input)


def said(text: str, item_id: str | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "role": "assistant", "content": [part]}
    return item if item_id is None else {**item, "id": item_id}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content, **fields}


def call(call_id: str, item_id: str | None = None) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    return item if item_id is None else {**item, "id": item_id}


def output(call_id: str, value: Any = "1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def shape(found: list[dict]) -> list[tuple]:
    return [(m["role"], m["content"], [c["id"] for c in m.get("tool_calls", [])]) for m in found]


def test_a_string_is_the_users_message() -> None:
    request = ResponsesRequest.model_validate({"model": "policy", "input": "hi"})
    assert messages_of(request.input) == [user("hi")]


def test_without_ids_a_reply_is_what_stands_in_its_order() -> None:
    items = [user("hi"), thought("hm"), said("Let me see."), call("x"), call("y")]
    items += [output("x"), output("y"), said("Sunny."), said("Anything else?")]
    found = messages(*items)
    assert shape(found) == [
        ("user", "hi", []),
        ("assistant", "Let me see.", ["x", "y"]),
        ("tool", "1", []),
        ("tool", "1", []),
        ("assistant", "Sunny.", []),
        ("assistant", "Anything else?", []),
    ]
    assert found[1]["reasoning_content"] == "hm"


def test_ids_put_parallel_calls_together_across_their_outputs() -> None:
    items = [user("hi"), call("x", f"fc_{ONE}_0"), output("x"), call("y", f"fc_{ONE}_1")]
    items += [output("y"), call("z", f"fc_{TWO}_0"), output("z")]
    assert shape(messages(*items)) == [
        ("user", "hi", []),
        ("assistant", None, ["x", "y"]),
        ("tool", "1", []),
        ("tool", "1", []),
        ("assistant", None, ["z"]),
        ("tool", "1", []),
    ]


def test_calls_of_two_turns_stay_apart() -> None:
    items = [user("hi"), call("x", f"fc_{ONE}_0"), call("y", f"fc_{TWO}_0")]
    assert [ids for _, _, ids in shape(messages(*items))] == [[], ["x"], ["y"]]


def test_reasoning_without_its_id_belongs_to_what_follows() -> None:
    found = messages(thought("hm"), said("Yes.", f"msg_{ONE}"), call("x", f"fc_{ONE}_0"))
    assert shape(found) == [("assistant", "Yes.", ["x"])]
    assert found[0]["reasoning_content"] == "hm"


def test_text_that_calls_cut_in_two_is_one_text() -> None:
    items = [said("A", f"msg_{ONE}"), call("x", f"fc_{ONE}_0"), said("\nB", f"msg_{ONE}_1")]
    assert shape(messages(*items)) == [("assistant", "A\nB", ["x"])]


def test_parts_and_other_roles() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    items += [call("x"), output("x", parts[:1])]
    found = messages(*items)
    assert found[0] == {"role": "developer", "content": "Be kind."}
    assert found[1]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert found[3] == {"role": "tool", "tool_call_id": "x", "content": "a"}


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CALLS = st.lists(st.tuples(TEXTS.filter(bool), TEXTS), max_size=3)


@settings(max_examples=40)
@given(content=TEXTS, reasoning=st.none() | TEXTS.filter(bool), calls=CALLS)
def test_a_reply_comes_back_as_the_same_message(
    content: str, reasoning: str | None, calls: list[tuple[str, str]]
) -> None:
    sent = tuple(
        SentCall(id=f"call_{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(calls)
    )
    reply = Reply(content=content, reasoning=reasoning, tool_calls=sent)
    items = reply_items(ONE, reply.message(), "completed")
    if reply.is_empty:
        assert items == []
        return
    assert all(turn_of_item(item["id"]) == ONE for item in items)
    (back,) = messages(*items)
    assert canonical_message(back) == canonical_message(reply.message())
    assert back.get("reasoning_content") == reasoning


def test_the_last_item_tells_how_the_reply_ended() -> None:
    reply = Reply(content="Yes", reasoning="hm", tool_calls=())
    statuses = [item["status"] for item in reply_items(ONE, reply.message(), "incomplete")]
    assert statuses == ["completed", "incomplete"]


def test_a_conversation_is_listed_as_items() -> None:
    items = [user("hi"), said("Yes.", f"msg_{ONE}"), call("x", f"fc_{ONE}_0"), output("x")]
    listed = input_items(TWO, messages(*items))
    assert [item["type"] for item in listed] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert [item["id"] for item in listed] == [f"item_{TWO}_{index}" for index in range(4)]
    assert listed[0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert listed[3]["output"] == "1"


def test_ids_that_are_not_ours() -> None:
    for item_id in (None, "", "msg_1", f"xx_{ONE}", f"msg_{ONE}_", f"item_{ONE}_0", "__fake_id__"):
        assert turn_of_item(item_id) is None
