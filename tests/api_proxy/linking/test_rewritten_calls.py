"""Clients that rewrite what stands beside a tool call, drop calls or rename their ids: each door
still finds the turn, keeps what was changed of it, and extends no prompt that was not sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from opd.commands.doctor import lines
from records.messages import EchoChange, Message
from records.names import TurnState
from records.reading.explaining import explain
from records.reading.waiting_limits import WaitingLimits
from records.types import TurnRecord
from tests.api_proxy.conftest import WEATHER, Door

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = "Let me see.\n" + CALL + "\n" + CALL.replace("Paris", "Rome")
USER = {"role": "user", "content": "Weather in Paris and Rome?"}
SANITISED = "[System: Empty message content sanitised to satisfy protocol]"
FUNCTION = WEATHER["function"]


async def by_chat(door: Door, messages: Sequence[Message]) -> TurnRecord:
    _, turn = await door.say(list(messages), tools=[WEATHER])
    return turn


async def by_responses(door: Door, messages: Sequence[Message]) -> TurnRecord:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    body = {"model": "policy", "input": items, "tools": [{"type": "function", **FUNCTION}]}
    response = await door.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return await door.turn(response.json()["id"].removeprefix("resp_"))


async def by_messages(door: Door, messages: Sequence[Message]) -> TurnRecord:
    given: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            given.append({"role": "user", "content": [result]})
            continue
        blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            value = json.loads(function["arguments"])
            name = function["name"]
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": value})
        given.append({"role": message["role"], "content": blocks})
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    tool["description"] = FUNCTION["description"]
    body = {"model": "policy", "max_tokens": 99, "messages": given, "tools": [tool]}
    response = await door.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return await door.turn(response.json()["id"].removeprefix("msg_"))


DOORS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


def dropped(answer: Message) -> Message:
    return {**answer, "content": None}


def replaced(answer: Message) -> Message:
    return {**answer, "content": SANITISED}


def added(answer: Message) -> Message:
    return {**answer, "content": answer["content"] + " One moment."}


def first_call_alone(answer: Message) -> Message:
    """As CrewAI does: no text, and one call at a time."""
    return {**answer, "content": None, "tool_calls": answer["tool_calls"][:1]}


def renamed(answer: Message) -> Message:
    calls = [{**call, "id": f"toolu_{at}"} for at, call in enumerate(answer["tool_calls"])]
    return {**answer, "tool_calls": calls}


def renamed_and_dropped(answer: Message) -> Message:
    return dropped(renamed(answer))


VARIATIONS: list[tuple[Callable[[Message], Message], tuple[EchoChange, ...]]] = [
    (dropped, ("text",)),
    (replaced, ("text",)),
    (added, ("text",)),
    (first_call_alone, ("text", "calls")),
    (renamed, ("ids",)),
    (renamed_and_dropped, ("text", "ids")),
]


def results_of(shown: Message) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": "21"}
        for call in shown["tool_calls"]
    ]


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize(("rewrite", "changes"), VARIATIONS)
async def test_a_rewritten_answer_is_found_by_its_calls(
    door: Door,
    name: str,
    rewrite: Callable[[Message], Message],
    changes: tuple[EchoChange, ...],
) -> None:
    door.will_say(SAID, "Warm.", "Bye.")
    first = await DOORS[name](door, [USER])
    shown = rewrite(first.response)
    results = results_of(shown)
    second = await DOORS[name](door, [USER, shown, *results])
    assert second.parent_turn_id == first.turn_id
    assert second.session_id == first.session_id
    judged = await door.turn(first.turn_id)
    assert judged.next_state == results
    assert judged.state is TurnState.JUDGING
    assert judged.echo_changes == changes
    # What the second prompt holds is what its client showed, not what had been sampled.
    rendered = door.rendering.prompt_ids(second.messages, second.tools)
    assert second.prompt_ids.tolist() == rendered.tolist()
    # Its own answer is echoed as it was: the conversation goes on by its path.
    history = [USER, shown, *results, second.response, {"role": "user", "content": "Bye."}]
    third = await DOORS[name](door, history)
    assert third.parent_turn_id == second.turn_id
    assert third.session_id == first.session_id
    assert (await door.turn(second.turn_id)).echo_changes == ()


@pytest.mark.parametrize("name", DOORS)
async def test_an_answer_that_comes_back_as_it_was_extends_and_has_no_changes(
    door: Door, name: str
) -> None:
    door.will_say(SAID, "Warm.")
    first = await DOORS[name](door, [USER])
    second = await DOORS[name](door, [USER, first.response, *results_of(first.response)])
    assert (await door.turn(first.turn_id)).echo_changes == ()
    sampled = np.concatenate([first.prompt_ids, first.response_ids])
    assert second.prompt_ids[: len(sampled)].tolist() == sampled.tolist()


@pytest.mark.parametrize("name", DOORS)
async def test_other_arguments_under_a_known_id_are_no_feedback_on_the_turn(
    door: Door, name: str
) -> None:
    door.will_say(CALL, "Warm.")
    first = await DOORS[name](door, [USER])
    (call,) = first.response["tool_calls"]
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    shown = {**first.response, "tool_calls": [{**call, "function": function}]}
    second = await DOORS[name](door, [USER, shown, *results_of(shown)])
    assert (await door.turn(first.turn_id)).next_state == []
    assert second.parent_turn_id is None
    assert second.session_id == first.session_id


async def test_ids_of_another_key_lead_nowhere(door: Door) -> None:
    door.will_say(SAID, "Warm.")
    first = await by_chat(door, [USER])
    shown = dropped(first.response)
    headers = {"authorization": "Bearer another"}
    _, second = await door.say([USER, shown, *results_of(shown)], headers, tools=[WEATHER])
    assert (second.parent_turn_id, second.session_id != first.session_id) == (None, True)
    assert (await door.turn(first.turn_id)).next_state == []


async def test_renamed_ids_after_several_steps_and_a_new_clock(door: Door) -> None:
    """Nothing of the path is left: the system prompt differs, and so does every id."""
    door.will_say(CALL, CALL, CALL, "Warm.")
    turns: list[TurnRecord] = []
    history: list[Message] = [USER]
    for step in range(3):
        clock = {"role": "system", "content": f"It is 10:0{step}"}
        turn = await by_chat(door, [clock, *history])
        turns.append(turn)
        (call,) = turn.response["tool_calls"]
        shown = {**turn.response, "tool_calls": [{**call, "id": f"id{step}"}]}
        history = [*history, shown, *results_of(shown)]
    last = await by_chat(door, [{"role": "system", "content": "It is 10:09"}, *history])
    assert last.parent_turn_id == turns[2].turn_id
    assert [(await door.turn(turn.turn_id)).echo_changes for turn in turns] == [("ids",)] * 3
    assert len({turn.session_id for turn in [*turns, last]}) == 1


async def test_equal_calls_of_different_conversations_are_no_evidence(door: Door) -> None:
    door.will_say(CALL, CALL, "Warm.")
    for text in ("Paris?", "And Paris?"):
        await by_chat(door, [{"role": "user", "content": text}])
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "x", "type": "function", "function": function}
    shown = {"role": "assistant", "content": None, "tool_calls": [call]}
    other = await by_chat(door, [USER, shown, *results_of(shown)])
    assert other.parent_turn_id is None


async def test_doctor_says_what_the_client_changed(door: Door) -> None:
    door.will_say(SAID, "Warm.")
    first = await by_chat(door, [USER])
    shown = replaced(first.response)
    await by_chat(door, [USER, shown, *results_of(shown)])
    (session,) = await door.store.sessions_named(first.session_id)
    run = await door.store.run_facts()
    limits = WaitingLimits(batch_size=16, idle_timeout_s=60.0, hint_wait_s=None)
    one = explain(session.turns[0], session, run, limits, 0.0)
    assert one.echo_changes == ("text",)
    report = {"session_id": "s", "name": None, "closed": None, "last_seen": 0.0}
    report |= {"outcome": None}
    text = "\n".join(lines([{**report, "turns": [{**asdict(one), "command": None}]}]))
    assert "sent this answer back with other text next to its calls" in text
