from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.rehearsal.preparing.states import (
    answers_objection,
    called_tools,
    choose_states,
    last_user_text,
    was_accepted_since,
    was_said_before,
)
from records.hints.types import HintState
from tests.opd.rehearsal.builders import a_source, a_state


def chosen(turns, known=(), max_states=16, min_messages=3, held_back=0.2):
    return choose_states(
        "h0", turns, known, max_states=max_states, min_messages=min_messages, held_back=held_back
    )


def states(*texts):
    return [a_state(f"t{number}", text) for number, text in enumerate(texts)]


def test_the_last_user_messages_must_differ():
    assert chosen(states("Karo?", " karo? ", "Milu?")) == []
    found = chosen(states("Karo?", "Milu?", "Oren?"))
    assert [state.turn_id for state in found] == ["t0", "t1", "t2"]
    assert not any(state.held_out for state in found), "fewer than four states hold none back"


def test_a_fifth_measures():
    found = chosen(states(*(f"Weather {number}?" for number in range(10))))
    assert sum(state.held_out for state in found) == 2
    assert len(found) == 10


def test_states_with_one_message_stay_together_and_messages_take_turns():
    turns = states("a", "a", "a", "a", "b", "c", "d")
    found = chosen(turns, max_states=4)
    assert {state.turn_id for state in found} == {"t0", "t4", "t5", "t6"}
    by_message = {}
    for state in chosen(turns):
        text = last_user_text(turns[int(state.turn_id[1:])].messages)
        by_message.setdefault(text, set()).add(state.held_out)
    assert all(len(roles) == 1 for roles in by_message.values())
    assert sorted(map(list, by_message.values())) == [[False], [False], [False], [True]]


@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcdefghijklmnop"), max_size=12),
)
def test_what_trained_never_measures_and_what_measures_never_trains(first, later):
    turns = states(*first, *later)
    before = chosen(turns[: len(first)])
    after = {state.turn_id: state.held_out for state in chosen(turns, before)}
    assert all(after[state.turn_id] == state.held_out for state in before)
    held = sum(after.values())
    assert not after or held < len(after)
    assert held == 0 or len(after) >= 4


def test_more_states_bring_those_that_measure():
    few = chosen(states("a", "b", "c"))
    more = chosen(states("a", "b", "c", "d", "e"), few)
    assert [state for state in more if state.held_out]
    assert all(state.turn_id in ("t3", "t4") for state in more if state.held_out)
    assert isinstance(more[0], HintState)


def test_tools_called_since_the_user_spoke():
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    early = {"type": "function", "function": {"name": "early", "arguments": "{}"}}
    turn = a_state(
        "t",
        "Now?",
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [early]},
            {"role": "user", "content": "Now?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "21"},
        ],
    )
    assert called_tools(turn) == {"get_weather"}


def test_a_state_behind_the_objection_is_none():
    source = a_source("t1", session_id="s", created_at=2.0)
    at = {"earlier": ("s", 1.0), "t1": ("s", 2.0), "later": ("s", 3.0), "other": ("r", 3.0)}
    states = [a_state(name, "x", session_id=s, created_at=when) for name, (s, when) in at.items()]
    assert [one.turn_id for one in states if was_said_before(one, [source])] == ["later"]


USER, TOOL = ({"role": role, "content": "Thanks."} for role in ("user", "tool"))


@pytest.mark.parametrize(
    ("created_at", "next_state", "accepted", "is_one"),
    [
        (3.0, [USER], {"t"}, True),
        (1.0, [USER], {"t"}, False),  # nobody had objected yet
        (3.0, [USER], set(), False),  # its user did not take it, or nobody judged it
        (3.0, [TOOL], {"t"}, False),  # a tool takes everything
        (3.0, [], {"t"}, False),
    ],
)
def test_an_answer_that_was_taken_after_the_objection(created_at, next_state, accepted, is_one):
    turn = a_state("t", "How warm is it?", created_at=created_at, next_state=next_state)
    sources = [a_source("s1", created_at=9.0), a_source("s0", created_at=2.0)]
    assert was_accepted_since(turn, accepted, sources) is is_one
    assert not was_accepted_since(turn, accepted, [])


def test_where_a_user_objects_the_wish_is_open():
    objected = replace(a_state("objected", "Karo?"), candidates=("Answer in Celsius.",))
    praised = a_state("praised", "Milu?")
    parents = {one.turn_id: one for one in (objected, praised)}
    behind = {
        name: answers_objection(replace(a_state("s", "No."), parent_turn_id=name), parents)
        for name in ("objected", "praised", "unknown", None)
    }
    assert behind == {"objected": True, "praised": False, "unknown": False, None: False}
