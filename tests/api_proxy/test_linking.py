"""Which turn a request answers, decided on values alone."""

from __future__ import annotations

from api_proxy.linking import (
    Candidate,
    is_unanswered,
    link_by_calls,
    link_by_fingerprint,
    link_by_path,
    newest_assistant,
    num_agreeing,
)
from records.names import DropReason, TurnState
from records.types import TurnRef

TOOL_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21"}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def calling(call_id: str) -> dict:
    function = {"name": "get_weather", "arguments": "{}"}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def ref(turn_id: str, **changes) -> TurnRef:
    values = {
        "turn_id": turn_id,
        "session_id": f"session of {turn_id}",
        "parent_turn_id": None,
        "state": TurnState.AWAITING_NEXT_STATE,
        "drop_reason": None,
        "prompt_node_id": "p",
        "response_node_id": "r",
        "has_next_state": False,
        "created_at": float(ord(turn_id[0])),
    }
    return TurnRef(**{**values, **changes})


def answered(turn_id: str, **changes) -> TurnRef:
    return ref(turn_id, state=TurnState.JUDGING, has_next_state=True, **changes)


def test_newest_assistant() -> None:
    assert newest_assistant([user("a"), assistant("b"), user("c"), TOOL_RESULT]) == 1
    assert newest_assistant([user("a")]) is None


def test_a_closed_session_waits_too_but_other_drops_do_not() -> None:
    assert is_unanswered(ref("a", state=TurnState.DROPPED, drop_reason=DropReason.NO_NEXT_STATE))
    assert not is_unanswered(ref("a", state=TurnState.DROPPED, drop_reason=DropReason.LENGTH_CUT))


def test_path_takes_the_oldest_unanswered_sibling() -> None:
    turns = [answered("a"), ref("c"), ref("b")]
    link = link_by_path(turns, [], [user("x")], None)
    assert link.parent is not None
    assert link.parent.turn_id == "b"
    assert link.next_state == (user("x"),)


def test_path_prefers_the_session_that_the_client_names() -> None:
    turns = [ref("a"), ref("b")]
    link = link_by_path(turns, [], [user("x")], "session of b")
    assert link.parent is not None
    assert link.parent.turn_id == "b"


def test_path_without_unanswered_turns() -> None:
    same = [answered("a", session_id="s"), answered("b", session_id="s")]
    link = link_by_path(same, [], [user("x")], None)
    assert link.parent is not None
    assert link.parent.turn_id == "b"
    different = link_by_path([answered("a"), answered("b")], [], [user("x")], None)
    assert different.ambiguous
    assert different.parent is None


def test_a_retry_belongs_to_the_turn_that_was_answered_before() -> None:
    turns = [answered("a"), ref("b")]
    earlier = ref("c", parent_turn_id="a")
    link = link_by_path(turns, [earlier], [user("x")], None)
    assert link.retry
    assert link.parent is not None
    assert link.parent.turn_id == "a"


def test_an_equal_prompt_of_another_named_session_is_no_retry() -> None:
    turns = [answered("a"), ref("b")]
    earlier = ref("c", parent_turn_id="a", session_id="session of a")
    link = link_by_path(turns, [earlier], [user("x")], "session of b")
    assert not link.retry
    assert link.parent is not None
    assert link.parent.turn_id == "b"


def test_fingerprint_prefers_the_longest_kept_tail() -> None:
    history = [user("summary"), user("q2"), assistant("Sure."), user("thanks")]
    short = Candidate(ref=ref("a"), messages=[user("q1"), user("q2")])
    other = Candidate(ref=ref("b"), messages=[user("q9")])
    link = link_by_fingerprint(history, 2, [other, short], None)
    assert link.parent is not None
    assert link.parent.turn_id == "a"
    assert link.next_state == (user("thanks"),)


def test_short_answer_without_agreeing_history_is_no_evidence() -> None:
    history = [user("new"), assistant("Done."), user("ok")]
    candidate = Candidate(ref=ref("a"), messages=[user("old")])
    assert link_by_fingerprint(history, 1, [candidate], None).how == "none"


def test_text_does_not_link_to_a_session_of_another_name() -> None:
    text = "This is a long answer that two users happen to have got."
    history = [user("q"), assistant(text), user("ok")]
    candidate = Candidate(ref=ref("a"), messages=[user("q")])
    assert link_by_fingerprint(history, 1, [candidate], "another").how == "none"
    call = [user("q"), calling("call_1"), TOOL_RESULT]
    assert link_by_fingerprint(call, 1, [candidate], "another").parent is not None


def test_tool_call_identifies_its_turn_after_compaction() -> None:
    history = [user("summary"), calling("call_1"), TOOL_RESULT]
    candidate = Candidate(ref=ref("a"), messages=[user("old")])
    link = link_by_fingerprint(history, 1, [candidate], None)
    assert link.parent is not None
    assert link.next_state == (TOOL_RESULT,)


def test_equal_answers_of_several_conversations_without_history_are_ambiguous() -> None:
    text = "This is a long answer that two users happen to have got."
    history = [user("summary"), assistant(text), user("ok")]
    candidates = [
        Candidate(ref=ref("a"), messages=[user("x")]),
        Candidate(ref=ref("b"), messages=[user("y")]),
    ]
    link = link_by_fingerprint(history, 1, candidates, None)
    assert link.ambiguous
    assert link.parent is None


def test_num_agreeing_counts_from_the_end() -> None:
    assert num_agreeing([user("a"), user("b"), user("c")], [user("x"), user("b"), user("c")]) == 2
    assert num_agreeing([], [user("a")]) == 0


def test_calls_link_to_their_one_turn() -> None:
    link = link_by_calls([ref("a")], [user("Observation: 21")])
    assert (link.how, link.parent) == ("calls", ref("a"))
    assert link.next_state == (user("Observation: 21"),)
    assert link_by_calls([], [user("x")]).how == "none"
    assert link_by_calls([ref("a"), ref("b")], [user("x")]).how == "none"


def test_different_prompts_that_fit_equally_are_no_evidence() -> None:
    history = [user("summary"), user("go on"), assistant("Ok."), user("next")]
    here = Candidate(ref=ref("a"), messages=[user("x"), user("go on")])
    there = Candidate(ref=ref("b"), messages=[user("y"), user("go on")])
    link = link_by_fingerprint(history, 2, [here, there], None)
    assert (link.ambiguous, link.parent, link.session_id) == (True, None, None)
    later = Candidate(ref=ref("c", session_id="session of a"), messages=there.messages)
    link = link_by_fingerprint(history, 2, [here, later], None)
    assert (link.ambiguous, link.parent, link.session_id) == (True, None, "session of a")


def test_fingerprint_prefers_what_differs_in_system_messages_alone() -> None:
    clock = {"role": "system", "content": "It is 10:01"}
    history = [clock, user("hi"), assistant("Hello!"), user("next")]
    same = Candidate(ref=ref("b"), messages=[{**clock, "content": "It is 10:00"}, user("hi")])
    longer = Candidate(ref=ref("a"), messages=[user("x"), assistant("y"), user("hi")])
    link = link_by_fingerprint(history, 2, [longer, same], None)
    assert link.parent == same.ref
    # Equal conversations: the oldest that nothing followed.
    twin = Candidate(ref=ref("c"), messages=same.messages)
    link = link_by_fingerprint(history, 2, [twin, longer, same], None)
    assert link.parent == same.ref


def test_what_was_asked_before_without_an_answer_is_a_retry() -> None:
    turns = [answered("a"), ref("b")]
    link = link_by_path(turns, [], [user("x")], None, asked_of="a")
    assert (link.retry, link.parent) == (True, turns[0])
    assert link_by_path(turns, [], [user("x")], None, asked_of="other").parent == turns[1]


def test_what_went_on_by_feedback_alone_still_waits_for_its_user() -> None:
    assert is_unanswered(ref("a", state=TurnState.TRAINED))
    assert is_unanswered(ref("a", state=TurnState.DROPPED, drop_reason=DropReason.NO_HINT))
    assert not is_unanswered(ref("a", state=TurnState.TRAINED, has_next_state=True))
