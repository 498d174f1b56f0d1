"""Which turn a request answers, decided on values alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import eq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proxy.linking import linking
from api_proxy.linking.linking import (
    Candidate,
    Link,
    is_unanswered,
    link_by_calls,
    link_by_equal_calls,
    link_by_fingerprint,
    link_by_path,
    newest_assistant,
    num_agreeing,
)
from records.messages import Message, fingerprint
from records.names import DropReason, TurnState
from records.types import TurnRef
from tests.linear_time import growth
from tests.messages import user

TOOL_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21"}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def calling(call_id: str) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [call_of(call_id, "{}")]}


def call_of(call_id: str, arguments: str) -> dict:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


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
    history = [user("a"), user("b"), user("c")]
    assert num_agreeing(history, [user("x"), user("b"), user("c")], eq) == 2
    assert num_agreeing([], [user("a")], eq) == 0


def test_calls_link_to_their_one_turn() -> None:
    history = [user("q"), assistant("Calling tools: call_1"), user("Observation: 21")]
    sent = Candidate(ref=ref("a"), messages=[user("q")], response=calling("call_1"))
    link = link_by_calls(history, 1, [sent])
    assert (link.how, link.parent) == ("calls", ref("a"))
    assert link.next_state == (user("Observation: 21"),)
    assert link.echo_changes == ("retold",)
    assert link_by_calls(history, 1, []).how == "none"
    edited = {**calling("call_1"), "tool_calls": [call_of("call_1", '{"city": "Rome"}')]}
    assert link_by_calls([user("q"), edited, TOOL_RESULT], 1, [sent]).how == "none"


def test_equal_calls_with_other_ids_link_where_something_before_them_agrees() -> None:
    renamed = [user("q"), calling("toolu_9"), {**TOOL_RESULT, "tool_call_id": "toolu_9"}]
    sent = Candidate(ref=ref("a"), messages=[user("q")], response=calling("call_1"))
    other = Candidate(ref=ref("b"), messages=[user("x")], response=calling("call_2"))
    link = link_by_equal_calls(renamed, 1, [other, sent], None)
    assert (link.how, link.parent, link.echo_changes) == ("equal_calls", ref("a"), ("ids",))
    assert link_by_equal_calls(renamed, 1, [other], None).how == "none"
    assert link_by_equal_calls(renamed, 1, [sent], "another").how == "none"
    different = Candidate(ref=ref("c"), messages=[user("y"), user("q")], response=calling("c"))
    twin = Candidate(ref=ref("d"), messages=[user("z"), user("q")], response=calling("d"))
    link = link_by_equal_calls([user("s"), *renamed], 2, [different, twin], None)
    assert (link.ambiguous, link.parent) == (True, None)


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


def defined(messages: Sequence[Message], index: int, pool: Sequence[Candidate]) -> Link:
    """What a link by fingerprint is, every identity of every candidate computed."""

    def spoken(given: Sequence[Message]) -> tuple[str, ...]:
        return tuple(fingerprint(one) for one in given if one["role"] != "system")

    history = [fingerprint(message) for message in messages[:index]]
    prompts = [[fingerprint(message) for message in one.messages] for one in pool]
    agreements = [
        next(
            (at for at, (a, b) in enumerate(zip(history[::-1], prompt[::-1])) if a != b),  # noqa: B905
            min(len(history), len(prompt)),
        )
        for prompt in prompts
    ]
    longest = max(agreements)
    kept = [at for at, length in enumerate(agreements) if length == longest]
    if longest == 0:
        kept = [at for at in kept if prompts[at][:1] == history[:1]]
    if not kept:
        return Link()
    said = {at: spoken(pool[at].messages) for at in kept}
    kept = [at for at in kept if said[at] == spoken(messages[:index])] or kept
    sessions = {pool[at].ref.session_id for at in kept}
    if len({said[at] for at in kept}) == 1 and (longest > 0 or len(sessions) == 1):
        parent = min((pool[at].ref for at in kept), key=lambda one: (one.created_at, one.turn_id))
        return Link(how="fingerprint", parent=parent, next_state=tuple(messages[index + 1 :]))
    session = sessions.pop() if len(sessions) == 1 else None
    return Link(how="fingerprint", ambiguous=True, session_id=session)


MESSAGES = st.sampled_from(
    [
        {"role": "system", "content": "s"},
        {"role": "system", "content": "t"},
        user("a"),
        user(" a"),
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        user("b"),
        assistant("c"),
    ]
)
PROMPTS = st.lists(MESSAGES, max_size=5)


@given(PROMPTS, st.lists(PROMPTS, min_size=1, max_size=5), st.booleans())
def test_any_histories_are_compared_as_defined(
    history: list[Message], prompts: list[list[Message]], one_session: bool
) -> None:
    session = {"session_id": "s"} if one_session else {}
    pool = [
        Candidate(ref=ref(name, **session), messages=prompt)
        for name, prompt in zip("abcde", prompts, strict=False)
    ]
    messages = [*history, assistant("Ok."), user("next")]
    link = link_by_fingerprint(messages, len(history), pool, None)
    assert link == defined(messages, len(history), pool)


def prompt_of(length: int, blank: str = "", start: str = "hi") -> list[Message]:
    return [user(start), *(user(f"{at} " + "x" * 2_000 + blank) for at in range(length))]


def digests(
    monkeypatch: pytest.MonkeyPatch, history: list[Message], prompts: list[list[Message]]
) -> int:
    """How many identities a link computes."""
    count = 0

    def counted(message: Message) -> str:
        nonlocal count
        count += 1
        return fingerprint(message)

    monkeypatch.setattr(linking, "fingerprint", counted)
    pool = [
        Candidate(ref=ref(f"a{at}"), messages=json.loads(json.dumps(prompt)))
        for at, prompt in enumerate(prompts)
    ]
    link = link_by_fingerprint([*history, assistant("Ok."), user("next")], len(history), pool, None)
    assert link.how == "fingerprint"
    return count


def test_many_candidates_cost_few_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    history = prompt_of(100)
    # Retries of one prompt, as it was told; told anew with other blanks; and others' long prompts
    # that agree with the end alone.
    assert digests(monkeypatch, history, [history] * 32) == 0
    assert digests(monkeypatch, history, [prompt_of(100, " ")] * 32) <= 2 * 101
    last = history[-1:]
    others = [prompt_of(300, start=f"{at}") + last for at in range(32)]
    assert digests(monkeypatch, history, others) <= 3 * 32


def fingerprinting(length: int, num_candidates: int) -> Callable[[], None]:
    messages = [*prompt_of(length), assistant("Ok."), user("next")]
    texts = json.dumps(prompt_of(length, " "))
    pool = [
        Candidate(ref=ref(f"a{at}"), messages=json.loads(texts)) for at in range(num_candidates)
    ]

    def work() -> None:
        assert link_by_fingerprint(messages, length + 1, pool, None).parent is not None

    return work


def test_the_time_grows_with_the_request_and_hardly_with_the_candidates() -> None:
    assert growth(fingerprinting(400, 32), fingerprinting(1_600, 32), below=6.6) < 6.6
    # 32 histories were 32 times the work of one.
    assert growth(fingerprinting(800, 1), fingerprinting(800, 32), below=10) < 10
