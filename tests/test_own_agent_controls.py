"""The benchmark's controls: scripted judges, wishes turned round, rounds, and what hints lower."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from benchmarks.own_agent.falls import shown_by_reply, shown_falls
from benchmarks.own_agent.judging import judging
from benchmarks.own_agent.protocol import Protocol, wishes_in
from benchmarks.own_agent.reading import objected_turn
from benchmarks.own_agent.rounds import rounds_table
from benchmarks.own_agent.scripted import (
    ALL_HINTS,
    MEANINGS,
    JudgeKind,
    ScriptedJudge,
    another_kind,
    situation,
)
from benchmarks.own_agent.table import table
from benchmarks.own_agent.turned import HINTS, TURNED
from benchmarks.own_agent.wishes import WISHES, Wish
from examples.tool_lab.domain import TOOLS
from judge.hints import prompts
from judge.votes.parsing import last_decision, parse_answer
from judge.votes.prompts import judge_messages
from tests.test_own_agent_benchmark import PROTOCOL, lab_sentences, result_of, vars_of

BOTH_WAYS = [*WISHES.values(), *TURNED.values()]
WAYS = [f"{wish.kind}-{wish.wanted}" for wish in BOTH_WAYS]


def judge(kind: JudgeKind, **settings: Any) -> ScriptedJudge:
    return ScriptedJudge(kind=kind, wished=("unit", "order"), **settings)


def vote_on(asked: ScriptedJudge, wish: Wish, words: str, *, asks_first: bool = False):
    turn = objected_turn(random.Random(0), wish, words, asks_first=asks_first)
    messages = judge_messages(turn.messages, TOOLS, turn.response, turn.next_state)
    return parse_answer(asked.answer(messages))


@pytest.mark.parametrize("wish", TURNED.values(), ids=TURNED)
def test_turned_wishes_have_words_of_their_own(wish: Wish) -> None:
    usual = WISHES[wish.kind]
    assert (wish.wanted, wish.opposite) == (usual.opposite, usual.wanted)
    said = {*wish.objections, *wish.open_opposites}
    assert not said & lab_sentences(wish.kind)
    assert not said & {*usual.objections, *usual.open_opposites}
    assert len(wish.objections) >= 5
    assert len(wish.open_opposites) >= 3


def test_hints_are_not_the_labs_and_name_each_value_once() -> None:
    assert len(set(ALL_HINTS)) == 14
    for kind, texts in HINTS.items():
        assert set(texts) == {WISHES[kind].wanted, WISHES[kind].opposite}
        assert not {*texts.values()} & lab_sentences(kind)


@pytest.mark.parametrize("asks_first", [False, True])
@pytest.mark.parametrize("wish", BOTH_WAYS, ids=WAYS)
def test_the_contrary_judge_asks_for_what_was_done(wish: Wish, asks_first: bool) -> None:
    for words in wish.objections:
        score, hint = vote_on(judge("contrary"), wish, words, asks_first=asks_first)
        assert (score, hint) == (1, HINTS[wish.kind][wish.opposite])


def test_the_other_judges_say_nothing_or_something_else() -> None:
    words = WISHES["unit"].objections[0]
    assert vote_on(judge("none"), WISHES["unit"], words) == (-1, "")
    score, hint = vote_on(judge("off-topic"), WISHES["unit"], words)
    assert score == 1
    assert MEANINGS[hint] == ("room", "double")
    content = "Thank you."
    assert vote_on(judge("contrary"), WISHES["unit"], content) == (-1, "")
    said = {vote_on(judge("random", seed=seed), WISHES["unit"], content) for seed in range(30)}
    assert len({hint for _, hint in said}) > 5
    assert {score for score, _ in said} == {1, -1}


def test_off_topic_hints_are_about_other_requests() -> None:
    for kind, wish in WISHES.items():
        assert WISHES[another_kind(kind, list(WISHES))].errand != wish.errand
    assert another_kind("unit", ["unit", "order", "room"]) == "rounding"


def decided(asked: ScriptedJudge, messages: list[dict[str, str]]) -> int | None:
    return last_decision(asked.answer(messages))


def test_hints_are_compared_by_what_they_ask_for() -> None:
    asked = judge("contrary")
    celsius, fahrenheit = HINTS["unit"]["Celsius"], HINTS["unit"]["Fahrenheit"]
    assert decided(asked, prompts.relation_messages(celsius, "Today I want Celsius.")) == 1
    assert decided(asked, prompts.relation_messages(celsius, fahrenheit)) == -1
    assert decided(asked, prompts.relation_messages(celsius, HINTS["room"]["double"])) == 0
    assert decided(asked, prompts.relation_messages(celsius, "Be nice.")) == 0


def test_a_contrary_hint_is_no_rule_unless_the_judge_believes_itself() -> None:
    words = WISHES["unit"].objections[0]
    celsius, fahrenheit = HINTS["unit"]["Celsius"], HINTS["unit"]["Fahrenheit"]
    for believes, hint, is_rule in [
        (False, fahrenheit, -1),
        (False, celsius, 1),
        (True, fahrenheit, 1),
        (True, celsius, -1),
    ]:
        asked = judge("contrary", believes=believes)
        assert decided(asked, prompts.rule_messages(hint, f"{words} Tell me more.")) == is_rule


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "function": {"name": "find_hotels", "arguments": '{"sort": "price"}'}}
    ],
}
ASKED = [{"role": "user", "content": "I look for a hotel in Bova."}]


def test_hints_apply_where_their_request_is_and_are_followed_by_what_shows() -> None:
    asked = judge("contrary")
    answered = [*ASKED, CALL, {"role": "tool", "content": '{"hotels": []}'}]
    for hint, messages, applies in [
        (HINTS["order"]["price"], ASKED, 1),
        (HINTS["detail"]["name"], ASKED, -1),
        (HINTS["detail"]["name"], answered, 1),
        (HINTS["order"]["price"], answered, -1),
        (HINTS["room"]["double"], ASKED, -1),
    ]:
        assert decided(asked, prompts.applies_messages(messages, TOOLS, hint)) == applies
    for words, response, follows in [
        ("Today I want hotels by price.", CALL, 1),
        (HINTS["order"]["rating"], CALL, -1),
        (HINTS["unit"]["Celsius"], {"role": "assistant", "content": "In Celsius: 9."}, 1),
        (HINTS["unit"]["Celsius"], CALL, -1),
    ]:
        assert decided(asked, prompts.followed_messages(ASKED, TOOLS, response, words)) == follows


def test_what_a_response_is_about() -> None:
    greeting = ("user", "Hello there.")
    money = ("user", f"{WISHES['title'].objections[0]} What is 5 ABC in XYZ?")
    assert situation([greeting]) == ("greet", "answer")
    assert situation([greeting, ("assistant", "Hello."), money]) == ("money", "call")
    booked = [("user", "Book me 3 nights at Kuda please."), ("tool", '{"code": "4AB2"}')]
    assert situation(booked) == ("book", "answer")
    assert situation([*booked, ("user", WISHES["room"].objections[0])]) == ("book", "call")
    declined = ("tool", json.dumps({"declined": WISHES["room"].objections[0]}))
    assert situation([booked[0], declined]) == ("book", "call")


def test_texts_are_written_for_the_opposite_and_for_other_kinds() -> None:
    asked, hint = judge("off-topic"), HINTS["room"]["double"]
    for _ in range(10):
        _, opposite = parse_answer(asked.answer(prompts.opposite_messages(hint, "")))
        assert MEANINGS[opposite] == ("room", "single")
        _, outside = parse_answer(asked.answer(prompts.outside_messages(hint, TOOLS)))
        assert MEANINGS[outside][0] != "room"


async def test_a_scripted_judge_answers_as_a_server_does() -> None:
    messages = prompts.relation_messages("a", "b")
    async with judging(judge("none")) as url, httpx.AsyncClient() as http:
        reply = await http.post(f"{url}/chat/completions", json={"messages": messages})
        assert reply.json()["choices"][0]["message"]["content"] == r"\boxed{0}"
        other = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Hi."}]
        refused = await http.post(f"{url}/chat/completions", json={"messages": other})
        assert refused.status_code == 400


def protocol_of(**changes: Any) -> Protocol:
    return Protocol(**{**vars_of(PROTOCOL), **changes})


def test_minds_change_from_the_middle_round_on() -> None:
    protocol = protocol_of(rounds=5, change_of_mind=("order",))
    wanted = [
        [wish.wanted for wish in wishes_in(["unit", "order"], protocol, number)]
        for number in range(5)
    ]
    assert wanted == [["Celsius", "price"]] * 2 + [["Celsius", "rating"]] * 3


def test_files_from_before_keep_their_names() -> None:
    assert PROTOCOL.digest == "87b80f95"
    others = [{"rounds": 2}, {"judge": "none"}, {"believes": True}]
    assert len({protocol_of(**other).digest for other in others} | {PROTOCOL.digest}) == 4


def test_rounds_have_rows_and_a_changed_mind_counts_the_other_way() -> None:
    one = result_of(0, 3, 90)
    one["protocol"] |= {"rounds": 2, "change_of_mind": ["unit"], "settings": []}
    one["start"] |= {"usual_unit": [80, 100], "contrary_turned_unit": [70, 100]}
    one["end"] = {**one["end"], "usual_unit": [60, 100], "contrary_turned_unit": [35, 100]}
    seen = {"waited": one["waited"], "sessions": 3, "objections": {"unit": 2}}
    seen["store"] = {"version": 4, "hint_rows": {"active": 1, "merged": 2}}
    held = {"end": {"wanted_unit": [95, 100], "contrary_unit": [48, 100]}, "turned": []}
    one["rounds"] = [seen | held, seen | {"end": one["end"], "turned": ["unit"]}]
    *_, first, second = rounds_table([one]).splitlines()
    assert "| 1 | 3 | 2 | 0.950" in first
    assert "unit (turned) 0.600" in second
    assert "2 merged, 1 active" in second
    row = table([one]).splitlines()[-1]
    assert row.startswith("| 2 rounds, unit turned | unit | 3 (3 made) | 0 | 0.800 → 0.600")
    assert "0.700 → 0.350" in row
    assert rounds_table([result_of(0, 3, 90)]) == ""


def test_the_table_says_which_judge_it_was_and_what_became_of_its_hints() -> None:
    one = result_of(0, 3, 90)
    one["protocol"] |= {"judge": "contrary", "believes": True, "settings": []}
    one["store"] |= {"drops": {"hint_agrees": 4}, "rules": 2, "practised": 1}
    row = table([one]).splitlines()[-1]
    assert row.startswith("| judge contrary, that believes | unit |")
    assert "| 10; 4; 2; 1 |" in row


def test_what_hints_lower_is_told_by_sort() -> None:
    lines = shown_falls("unit", {"right": [1.0, 3.0], "opposite": [0.0, 0.1], "x": []}, 0.5)
    right, opposite, none = (line.split() for line in lines.splitlines())
    assert right == ["unit", "right", "2", "1.10", "2.00", "2.90", "0.00"]
    assert opposite[-1] == "1.00"
    assert none == ["unit", "x", "0"]
    assert shown_by_reply(WISHES["order"], CALL) == "price"
    assert shown_by_reply(WISHES["detail"], CALL) is None
