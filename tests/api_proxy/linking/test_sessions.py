"""Sessions, links and next states through the endpoint, with and without headers."""

from __future__ import annotations

import asyncio

import pytest

from records.names import DropReason, TurnState
from records.types import TurnRecord
from tests.api_proxy.conftest import WEATHER, Door
from tests.messages import user

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def tool(call: dict, text: str) -> dict:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def again(door: Door, turn: TurnRecord) -> TurnRecord:
    """The turn as it is stored now."""
    return await door.turn(turn.turn_id)


async def test_conversation_without_headers(door: Door) -> None:
    door.will_say("Hello.", "Fine.", "Bye.")
    history = [user("hi")]
    turns = []
    for text in ("how are you?", "bye", None):
        message, turn = await door.say(history)
        turns.append(turn)
        history += [message, *([user(text)] if text else [])]
    first, second, third = [await again(door, turn) for turn in turns]
    assert first.session_id == second.session_id == third.session_id
    assert (second.parent_turn_id, third.parent_turn_id) == (first.turn_id, second.turn_id)
    assert first.next_state == [user("how are you?")]
    assert second.next_state == [user("bye")]
    assert [turn.state for turn in (first, second, third)] == [
        TurnState.JUDGING,
        TurnState.JUDGING,
        TurnState.AWAITING_NEXT_STATE,
    ]


async def test_parallel_tool_results_and_the_user_are_one_next_state(door: Door) -> None:
    door.will_say(CALL + "\n" + CALL.replace("Paris", "Rome"), "Both are warm.")
    message, turn = await door.say([user("weather?")], tools=[WEATHER])
    first, second = message["tool_calls"]
    results = [tool(first, "21"), tool(second, "25"), user("in Fahrenheit please")]
    await door.say([user("weather?"), message, *results], tools=[WEATHER])
    assert (await again(door, turn)).next_state == results


async def test_clock_in_the_system_prompt(door: Door) -> None:
    door.will_say("Hello.", "Fine.", "Good.")
    message, first = await door.say([system("It is 10:00"), user("hi")])
    history = [system("It is 10:01"), user("hi"), message, user("how are you?")]
    message, second = await door.say(history)
    history = [system("It is 10:02"), *history[1:], message, user("and now?")]
    _, third = await door.say(history)
    assert (await again(door, first)).next_state == [user("how are you?")]
    assert (await again(door, second)).next_state == [user("and now?")]
    assert first.session_id == second.session_id == third.session_id


async def test_reserialised_arguments_and_dropped_reasoning(door: Door) -> None:
    door.will_say("<think>\nhm\n</think>\n\n" + CALL, "Warm.")
    message, turn = await door.say([user("weather?")], tools=[WEATHER])
    call = message["tool_calls"][0]
    echo = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {**call, "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
        ],
    }
    await door.say([user("weather?"), echo, tool(call, "21")], tools=[WEATHER])
    assert (await again(door, turn)).next_state == [tool(call, "21")]


async def test_compacted_history_links_by_its_kept_tail(door: Door) -> None:
    door.will_say("Hello.", CALL, "It is warm.")
    message, first = await door.say([user("hi")], tools=[WEATHER])
    history = [user("hi"), message, user("weather?")]
    message, second = await door.say(history, tools=[WEATHER])
    result = tool(message["tool_calls"][0], "21")
    compacted = [user("Summary: the user said hi."), user("weather?"), message, result]
    _, third = await door.say(compacted, tools=[WEATHER])
    assert (await again(door, second)).next_state == [result]
    assert third.session_id == second.session_id == first.session_id


async def test_eight_sub_agents_with_one_prefix(door: Door) -> None:
    prefix = [system("You are a sub-agent."), user("Find the weather.")]
    calls = [CALL.replace("Paris", f"City{index}") for index in range(8)]
    door.will_say(*calls, *[f"Result {index}." for index in range(8)])
    started = [await door.say(prefix, tools=[WEATHER]) for _ in range(8)]
    results = []
    for index, (message, turn) in enumerate(started):
        result = tool(message["tool_calls"][0], f"{index} degrees")
        _, after = await door.say([*prefix, message, result], tools=[WEATHER])
        results.append((turn, after, result))
    for turn, after, result in results:
        assert (await again(door, turn)).next_state == [result]
        assert after.session_id == turn.session_id
        assert after.parent_turn_id == turn.turn_id
    assert len({turn.session_id for turn, _, _ in results}) == 8


async def test_two_users_who_say_hi_and_get_the_same_answer(door: Door) -> None:
    door.will_say("Hello!", "Hello!", "Sure.", "Of course.", "Again.")
    message, first = await door.say([user("hi")])
    _, second = await door.say([user("hi")])
    assert first.session_id != second.session_id
    _, third = await door.say([user("hi"), message, user("weather?")])
    assert (await again(door, first)).next_state == [user("weather?")]
    assert (await again(door, second)).state is TurnState.AWAITING_NEXT_STATE
    _, fourth = await door.say([user("hi"), message, user("news?")])
    assert (await again(door, second)).next_state == [user("news?")]
    assert (third.session_id, fourth.session_id) == (first.session_id, second.session_id)
    _, fifth = await door.say([user("hi"), message, user("a third one?")])
    assert fifth.drop_reason is DropReason.AMBIGUOUS_PARENT
    assert fifth.parent_turn_id is None
    assert (await again(door, first)).next_state == [user("weather?")]
    assert (await again(door, second)).next_state == [user("news?")]


async def test_named_sessions_keep_equal_conversations_apart(door: Door) -> None:
    door.will_say("Hello!", "Hello!", "Sure.", "Sure.")
    message, first = await door.say([user("hi")], {"X-Session-Id": "a"})
    _, second = await door.say([user("hi")], session_id="b")
    await door.say([user("hi"), message, user("thanks")], session_id="b")
    assert (await again(door, first)).state is TurnState.AWAITING_NEXT_STATE
    assert (await again(door, second)).next_state == [user("thanks")]
    _, last = await door.say([user("hi"), message, user("thanks")], {"X-Session-Id": "a"})
    assert (await again(door, first)).next_state == [user("thanks")]
    assert last.session_id == first.session_id


async def test_a_retry_is_not_feedback(door: Door) -> None:
    door.will_say("Hello!", "Hello!", "Sure.", "Certainly.", "Sure again.")
    message, first = await door.say([user("hi")])
    _, sibling = await door.say([user("hi")])
    request = [user("hi"), message, user("weather?")]
    _, answer = await door.say(request)
    _, retried = await door.say(request)
    assert retried.parent_turn_id == answer.parent_turn_id == first.turn_id
    assert (await again(door, first)).next_state == [user("weather?")]
    assert (await again(door, sibling)).state is TurnState.AWAITING_NEXT_STATE
    assert (await again(door, answer)).state is TurnState.AWAITING_NEXT_STATE


async def test_an_edited_answer_is_not_feedback_and_keeps_its_session(door: Door) -> None:
    door.will_say("Hello.", "Fine.", "Whatever.")
    message, first = await door.say([user("hi")])
    _, second = await door.say([user("hi"), message, user("how are you?")])
    edited = {"role": "assistant", "content": "I never said that, it was edited by someone."}
    history = [user("hi"), message, user("how are you?"), edited, user("bye")]
    _, third = await door.say(history)
    assert (await again(door, second)).state is TurnState.AWAITING_NEXT_STATE
    assert (await again(door, first)).next_state == [user("how are you?")]
    assert third.parent_turn_id is None
    assert third.session_id == first.session_id


async def test_an_edited_user_message_makes_a_branch(door: Door) -> None:
    door.will_say("Hello.", "Fine.", "Well.")
    message, first = await door.say([user("hi")])
    await door.say([user("hi"), message, user("how are you?")])
    _, branch = await door.say([user("hi"), message, user("who are you?")])
    assert (await again(door, first)).next_state == [user("how are you?")]
    assert branch.parent_turn_id == first.turn_id
    assert branch.session_id == first.session_id


async def test_keys_have_trees_of_their_own(door: Door) -> None:
    door.will_say("Hello!", "Sure.")
    message, first = await door.say([user("hi")], {"Authorization": "Bearer one"})
    history = [user("hi"), message, user("thanks")]
    _, other = await door.say(history, {"Authorization": "Bearer two"})
    assert (await again(door, first)).state is TurnState.AWAITING_NEXT_STATE
    assert other.parent_turn_id is None
    assert other.session_id != first.session_id


async def test_few_shot_examples_link_to_nothing(door: Door) -> None:
    door.will_say("Done.", "Done.")
    await door.say([user("do it")])
    example = [user("example"), {"role": "assistant", "content": "Done."}, user("now you")]
    _, turn = await door.say(example)
    assert turn.parent_turn_id is None
    metrics = (await door.client.get("/metrics")).text
    assert 'opd_links_total{how="unmatched"} 1.0' in metrics


async def test_a_side_turn_takes_no_next_state(door: Door) -> None:
    door.will_say("Title", "Ok.")
    message, side = await door.say([user("hi")], turn_type="side")
    await door.say([user("hi"), message, user("thanks")])
    assert (await again(door, side)).drop_reason is DropReason.SIDE_TURN


@pytest.mark.parametrize("text", [None, ""])
async def test_null_and_empty_content_are_the_same_message(door: Door, text: str | None) -> None:
    door.will_say(CALL, "Warm.")
    message, turn = await door.say([user("weather?")], tools=[WEATHER])
    echo = {**message, "content": text}
    result = tool(message["tool_calls"][0], "21")
    await door.say([user("weather?"), echo, result], tools=[WEATHER])
    assert (await again(door, turn)).next_state == [result]


async def test_equal_conversations_that_go_on_at_the_same_moment(door: Door) -> None:
    door.will_say(*["Hello!"] * 4, *["Sure."] * 4)
    started = [await door.say([user("hi")]) for _ in range(4)]
    message = started[0][0]
    replies = [user(f"reply {index}") for index in range(4)]
    await asyncio.gather(*(door.say([user("hi"), message, reply]) for reply in replies))
    next_states = [(await again(door, turn)).next_state for _, turn in started]
    assert sorted(state[0]["content"] for state in next_states) == [
        reply["content"] for reply in replies
    ]


async def test_calls_told_again_as_text_lead_back_to_their_turn(door: Door) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Karo"}}\n</tool_call>'
    door.will_say(call, "It is warm.", "Who?")
    question = {"role": "user", "content": "weather?"}
    message, turn = await door.say([question], tools=[WEATHER])
    told = {"role": "assistant", "content": f"Calling tools:\n{message['tool_calls']}"}
    result = {"role": "user", "content": "Observation: 21"}
    _, after = await door.say([question, told, result], tools=[WEATHER])
    assert after.parent_turn_id == turn.turn_id
    assert after.session_id == turn.session_id
    assert (await door.turn(turn.turn_id)).next_state == [result]
    _, other = await door.say([question, told, result], {"Authorization": "Bearer other"})
    assert other.parent_turn_id is None
