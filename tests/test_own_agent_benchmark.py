"""The benchmark with people of its own: what they judge, what they say, and what the table makes of
it.
"""

from __future__ import annotations

import json
import random
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from benchmarks.own_agent.__main__ import kinds_of, objections_of
from benchmarks.own_agent.agent import remembering, what_follows
from benchmarks.own_agent.cell import (
    free_folder,
    measured_cell,
    none_practised,
    remembered,
)
from benchmarks.own_agent.measure import (
    Attempt,
    Task,
    copies_names,
    is_valid_call,
    rates_of,
    tasks_for,
    tells_facts,
    value_shown,
)
from benchmarks.own_agent.people import (
    MAX_FAILURES,
    Patience,
    Person,
    Request,
    errands_for,
    wishes_of_one,
)
from benchmarks.own_agent.picture import label, picture
from benchmarks.own_agent.protocol import Cell, Protocol
from benchmarks.own_agent.table import fall_of, grouped, ratio, table, until_table
from benchmarks.own_agent.travel import Call, Travel, call_problem, calls_of
from benchmarks.own_agent.wishes import (
    CODE,
    DETAIL,
    ORDER,
    ROOM,
    ROUNDING,
    TITLE,
    UNIT,
    WISHES,
    Errand,
    Wish,
    shown_by_answer,
)
from examples.tool_lab import phrases
from examples.tool_lab.evaluate import Rate
from examples.tool_lab.names import is_held_out
from examples.tool_lab.preferences import PREFERENCES

PROTOCOL = Protocol(
    quiet_sessions=2,
    sessions=4,
    n=8,
    pace=0.0,
    wait_s=1.0,
    steady_s=1.0,
    every=2,
    model="0",
    words="0",
)


def lab_sentences(kind: str) -> set[str]:
    """All that the lab's users and hints say of a kind."""
    preference = PREFERENCES[kind]
    said = {hint for hints in preference.hints.values() for hint in hints}
    for value in (preference.default, preference.alternative):
        for template in (*phrases.CORRECTIONS, *phrases.STATED, *phrases.PRAISES):
            for wish in preference.wishes[value]:
                for other in preference.wishes[preference.other(value)]:
                    said.add(phrases.sentence(template.format(wish=wish, other=other)))
    return said


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_people_say_nothing_that_the_lab_says(wish: Wish) -> None:
    assert not {*wish.objections, *wish.open_opposites} & lab_sentences(wish.kind)
    assert len(set(wish.objections)) == len(wish.objections) >= 5


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_wishes_are_for_what_the_model_mostly_does_not_do(wish: Wish) -> None:
    preference = PREFERENCES[wish.kind]
    assert (wish.wanted, wish.opposite) == (preference.alternative, preference.default)
    assert (wish.errand, wish.site) == (preference.request_kind, preference.site)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("unit", "In Celsius: 9 in Bova, sun.", "Celsius"),
        ("unit", "In Fahrenheit: 48 in Bova, sun.", "Fahrenheit"),
        ("unit", "Celsius or Fahrenheit?", None),
        ("unit", "It is sunny.", None),
        ("rounding", "5 ABC is about 12 XYZ.", "about"),
        ("rounding", "5 ABC is 12.40 XYZ.", "exact"),
        ("detail", "First in Bova: Kuda, 80 a night.", "priced"),
        ("detail", "First in Bova: Kuda.", "name"),
        ("code", "Booked Kuda for 3 nights, code 4AB2.", "code"),
        ("code", "Booked Kuda for 3 nights.", "short"),
        ("title", "Hello, Captain. How can I help?", "Captain"),
        ("title", "Hello. How can I help?", "plain"),
        ("title", "  ", None),
    ],
)
def test_answers_are_judged_by_what_they_say(kind: str, text: str, value: str | None) -> None:
    assert shown_by_answer(kind, text) == value


def person(
    *wishes: Wish, errands: list[Errand] | None = None, limit: int | None = None, seed: int = 0
) -> Person:
    rng = random.Random(seed)
    return Person(
        rng=rng,
        travel=Travel(rng=random.Random(seed + 1), held_out=False),
        errands=errands or [wish.errand for wish in wishes],
        wishes=wishes,
        patience=Patience(limit),
    )


def reply_calling(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def reply_saying(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_somebody_objects_to_an_answer_once_and_leaves_when_it_comes_again() -> None:
    somebody = person(UNIT)
    somebody.ask()
    city = somebody.request.slots["city"]
    [told] = what_follows(reply_calling("get_weather", city=city), somebody, asks_first=False)
    assert set(json.loads(told["content"])) == {"temp_c", "temp_f", "sky"}
    wrong = reply_saying("In Fahrenheit: 48 in Bova, sun.")
    [said] = what_follows(wrong, somebody, asks_first=False)
    assert said["role"] == "user"
    assert said["content"] in UNIT.objections
    assert somebody.patience.said == {"unit": 1}
    assert what_follows(wrong, somebody, asks_first=False) == []
    assert somebody.patience.said == {"unit": 1}


def test_who_is_content_goes_on_without_a_word_about_it() -> None:
    somebody = person(TITLE, errands=["greet", "money"])
    somebody.ask()
    [said] = what_follows(reply_saying("Hello, Captain."), somebody, asks_first=False)
    assert said["content"] == somebody.request.text
    assert somebody.request.errand == "money"
    assert not somebody.patience.said


@pytest.mark.parametrize("asks_first", [False, True])
def test_words_on_a_call_come_with_its_result_or_in_its_place(asks_first: bool) -> None:
    somebody = person(ROOM)
    somebody.ask()
    booking = {"hotel": somebody.request.slots["hotel"], "nights": 3, "room": "single"}
    following = what_follows(
        reply_calling("book_hotel", **booking), somebody, asks_first=asks_first
    )
    if asks_first:
        [told] = following
        assert json.loads(told["content"])["declined"] in ROOM.objections
    else:
        told, said = following
        assert set(json.loads(told["content"])) == {"code"}
        assert said["content"] in ROOM.objections
    # An answer in place of another call is not what was asked for.
    assert what_follows(reply_saying("Booked."), somebody, asks_first=asks_first) == []


def test_people_without_patience_leave_without_a_word() -> None:
    somebody = person(ORDER, limit=0)
    somebody.ask()
    search = {"city": somebody.request.slots["city"], "sort": "rating"}
    assert what_follows(reply_calling("find_hotels", **search), somebody, asks_first=False) == []
    assert not somebody.patience.said


def test_patience_is_for_each_wish() -> None:
    patience = Patience(1)
    patience.said["unit"] += 1
    assert not patience.has_left("unit")
    assert patience.has_left("order")
    assert not patience.is_over(["unit", "order"])
    assert patience.is_over(["unit"])
    assert Patience(None).has_left("unit")


def test_a_call_that_fails_is_answered_with_its_error_and_no_words() -> None:
    somebody = person(UNIT)
    somebody.ask()
    wrong = reply_calling("get_weather", city="Nowhere")
    for _ in range(MAX_FAILURES):
        [told] = what_follows(wrong, somebody, asks_first=False)
        assert json.loads(told["content"]) == {"error": "unknown city Nowhere"}
    assert what_follows(wrong, somebody, asks_first=False) == []
    assert what_follows(reply_saying("In Celsius: 3."), somebody, asks_first=False) == []


def test_greetings_come_first_and_every_wish_has_its_errand() -> None:
    for seed in range(20):
        errands = errands_for(random.Random(seed), [UNIT, TITLE, DETAIL, ORDER])
        assert errands[0] == "greet"
        assert {"greet", "weather", "hotels"} <= set(errands)
        assert len(errands) in (3, 4)


def test_of_many_wishes_one_person_has_two_and_in_the_end_all_are_wished() -> None:
    two, many = [UNIT, ORDER], list(WISHES.values())
    assert wishes_of_one(random.Random(0), two) == two
    of_people = [wishes_of_one(random.Random(seed), many) for seed in range(40)]
    assert {len({wish.kind for wish in own}) for own in of_people} == {2}
    assert {wish.kind for own in of_people for wish in own} == set(WISHES)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("get_weather", {"city": "Bova"}, None),
        ("get_wether", {"city": "Bova"}, "no tool get_wether"),
        ("get_weather", None, "arguments must be an object"),
        ("get_weather", {}, "missing argument city"),
        ("get_weather", {"city": "Bova", "day": 1}, "unknown argument day"),
        ("find_hotels", {"city": "Bova", "sort": "stars"}, "bad sort"),
        ("book_hotel", {"hotel": "Kuda", "nights": True, "room": "single"}, "bad nights"),
    ],
)
def test_calls_have_the_form_that_the_tool_wants(
    name: str, arguments: dict[str, Any] | None, problem: str | None
) -> None:
    assert call_problem(Call(call_id="1", name=name, arguments=arguments)) == problem


def test_calls_without_json_objects_have_no_arguments() -> None:
    reply = reply_calling("get_weather", city="Bova")
    reply["tool_calls"][0]["function"]["arguments"] = "[1"
    assert calls_of(reply)[0].arguments is None


def test_names_to_measure_with_are_in_no_session() -> None:
    for wish in (UNIT, ROOM):
        for task in tasks_for(wish, 5, 0, opposite=False):
            assert task.travel.known
            assert all(is_held_out(name) for name in task.travel.known)
    somebody = person(UNIT)
    somebody.ask()
    assert not any(is_held_out(name) for name in somebody.travel.known)


def task_of(wish: Wish, *, opposite: bool = False, **slots: Any) -> Task:
    request = Request(errand=wish.errand, text="", slots=slots)
    travel = Travel(rng=random.Random(0), held_out=True)
    return Task(wish=wish, request=request, travel=travel, opposite=opposite)


def called(name: str, **arguments: Any) -> Call:
    return Call(call_id="1", name=name, arguments=arguments)


def test_rates_count_what_shows_nothing_against_them() -> None:
    weather = called("get_weather", city="Bova")
    result = {"temp_c": 9, "temp_f": 48, "sky": "sun"}
    right = Attempt(
        first=weather, done=weather, result=result, answer="In Celsius: 9 in Bova, sun."
    )
    invented = Attempt(first=None, answer="In Celsius: 9 in Bova, sun.")
    without = Attempt(first=called("get_weather", city="Bov"))
    unit = task_of(UNIT, city="Bova")
    openly = task_of(UNIT, opposite=True, city="Bova")
    order = task_of(ORDER, city="Bova")
    by_rating = Attempt(first=called("find_hotels", city="Bova", sort="rating"))
    rates = rates_of(
        [unit, unit, unit, openly, order], [right, invented, without, right, by_rating]
    )
    assert rates == {
        "wanted_unit": Rate(hits=1, count=3),
        "usual_unit": Rate(hits=0, count=3),
        "contrary_unit": Rate(hits=0, count=1),
        "wanted_order": Rate(hits=0, count=1),
        "usual_order": Rate(hits=1, count=1),
        "valid_calls": Rate(hits=3, count=4),
        "copied_names": Rate(hits=2, count=4),
        "facts": Rate(hits=1, count=1),
    }


def test_a_call_of_another_tool_is_not_valid_and_shows_no_value() -> None:
    task = task_of(ROOM, hotel="Kuda", nights=3)
    assert not is_valid_call(task.request, called("get_weather", city="Kuda"))
    assert value_shown(task, Attempt(first=None)) is None
    right = called("book_hotel", hotel="Kuda", nights=3, room="double")
    assert is_valid_call(task.request, right)
    assert copies_names(task.request, right)
    assert not copies_names(task.request, None)
    assert value_shown(task, Attempt(first=right)) == "double"


@pytest.mark.parametrize(
    ("wish", "slots", "result", "answer", "told"),
    [
        (UNIT, {"city": "Bova"}, {"temp_c": 9, "temp_f": 48, "sky": "fog"}, "9 in Bova, fog", 0),
        (
            UNIT,
            {"city": "Bova"},
            {"temp_c": 9, "temp_f": 48, "sky": "fog"},
            "In Celsius: 9 in Bova, fog.",
            1,
        ),
        (
            ROUNDING,
            {"amount": 5, "source": "ABC", "target": "XYZ"},
            {"value": "12.40"},
            "5 ABC is about 12 XYZ.",
            1,
        ),
        (
            ROUNDING,
            {"amount": 5, "source": "ABC", "target": "XYZ"},
            {"value": "12.40"},
            "5 ABC is 12 XYZ.",
            0,
        ),
        (CODE, {"hotel": "Kuda", "nights": 3}, {"code": "4AB2"}, "Booked Kuda for 3 nights.", 1),
        (
            DETAIL,
            {"city": "Bova"},
            {"hotels": [{"name": "Kuda", "price": 80, "rating": 5}]},
            "First in Bova: Kuda, 81 a night.",
            0,
        ),
    ],
)
def test_answers_tell_facts_in_whichever_form(
    wish: Wish, slots: dict[str, Any], result: dict[str, Any], answer: str, told: int
) -> None:
    assert tells_facts(task_of(wish, **slots).request, result, answer) is bool(told)


LESSONS = {
    "lessons": {"hint trained": 8, "keep trained": 4, "hint dropped": 2},
    "lesson_drops": {"stale": 2},
}


def result_of(seed: int, objections: int | None, held: int, *settings: str) -> dict[str, Any]:
    protocol = Protocol(**{**vars_of(PROTOCOL), "settings": settings})
    return {
        "kinds": ["unit"],
        "seed": seed,
        "asked_objections": objections,
        "digest": protocol.digest,
        "protocol": vars_of(protocol),
        "start": {"wanted_unit": [20, 100], "contrary_unit": [96, 100], **kept(80)},
        "end": {"wanted_unit": [held, 100], "contrary_unit": [48, 100], **kept(70)},
        "quiet": {"sessions": 2, "seconds": 4.0, "objections": {}},
        "objecting": {"sessions": 4, "seconds": 6.0, "objections": {"unit": objections or 7}},
        "looks": [
            {"sessions": 4, "rates": {"wanted_unit": [79, 100]}},
            {"sessions": 6, "rates": {"wanted_unit": [80, 100]}},
        ],
        "waited": {"seconds": 61.0, "ended": "time is up", "hints": {"resting": 1}},
        "store": {"version": 5, "accepted": 10, "drops": {"stale": 1}, **LESSONS},
    }


def vars_of(protocol: Protocol) -> dict[str, Any]:
    return {name: getattr(protocol, name) for name in Protocol.__dataclass_fields__}


def kept(order: int) -> dict[str, list[int]]:
    names = ("valid_calls", "copied_names", "facts", "usual_room")
    return {name: [90, 100] for name in names} | {
        "usual_order": [order, 100],
        # Of the wish itself: nothing untouched.
        "usual_unit": [order // 10, 100],
    }


def test_the_table_pools_seeds_and_keeps_protocols_apart() -> None:
    results = [result_of(1, 1, 90), result_of(0, 1, 80), result_of(0, 1, 20, "a.b=1")]
    assert [[one["seed"] for one in group] for group in grouped(results)] == [[0], [1, 0]]
    header, _, other, documented = table(results).splitlines()
    assert header.count("|") == other.count("|") == documented.count("|")
    assert other.startswith("| a.b=1 | unit | 1 (1 made) | 0 | 0.200 → 0.200 [0.133, 0.289]")
    cells = [cell.strip() for cell in documented.strip("|").split("|")]
    assert cells[:5] == [
        "as documented",
        "unit",
        "1 (1, 1 made)",
        "0, 1",
        "0.200 → 0.850 [0.794, 0.893]",
    ]
    assert cells[6] == "0.500"
    assert cells[7] == "0.850 → 0.800, n 400"
    assert cells[8].startswith("+0.050 [-0.003, +0.103]; worst order +0.100 [")
    assert cells[9] == "1.000 (valid calls)"
    assert cells[10:13] == ["5, 5", "2 of 20", "24; 4 stale"]
    assert cells[13:15] == ["2 resting", "20; 0; -; -"]
    assert cells[15:] == ["61 (time is up); 61 (time is up)"]


def test_sessions_until_wishes_hold_are_told_by_seed() -> None:
    row = until_table([result_of(0, None, 90), result_of(0, 3, 90)]).splitlines()[-1]
    assert row == "| as documented | unit | 0 | 6 sessions | 7 | 10 |"
    never = result_of(0, None, 90) | {"looks": []}
    assert "not in 6 sessions" in until_table([never])
    assert until_table([result_of(0, 3, 90)]) == ""


def test_what_was_not_measured_is_not_a_number() -> None:
    assert ratio(Rate(hits=0, count=8), Rate(hits=1, count=8)) is None
    assert ratio(None, Rate(hits=1, count=8)) is None
    assert fall_of(None, Rate(hits=1, count=8)) is None
    bare = result_of(0, 1, 90) | {"start": {}, "end": {}}
    assert "| - → - | - → - | - |" in table([bare])


def test_each_kind_of_people_is_a_row_of_the_picture() -> None:
    results = [result_of(0, 1, 80), result_of(1, 1, 85), result_of(0, 1, 20, "a.b=1")]
    assert [label(group) for group in grouped(results)] == [
        "unit, 1 objections each\na.b=1",
        "unit, 1 objections each",
    ]
    drawn = picture(results)
    assert drawn.startswith("<svg")
    assert "a.b=1" in drawn


def test_hints_are_done_when_none_is_practised() -> None:
    active = {"status": "active", "not_rehearsed": None}
    blocked = {"status": "active", "not_rehearsed": "not_a_rule"}
    assert not none_practised([])
    assert not none_practised([active, blocked])
    assert none_practised([blocked, {"status": "resting", "not_rehearsed": None}])


async def test_a_cell_that_is_there_is_not_measured_again(tmp_path: Path) -> None:
    cell = Cell(kinds=("unit",), seed=0, objections=1)
    path = tmp_path / f"{cell.name(PROTOCOL)}.json"
    path.write_text('{"seed": 0}')
    assert await measured_cell(cell, PROTOCOL, tmp_path) == {"seed": 0}
    (tmp_path / "run").mkdir()
    assert free_folder(tmp_path / "run").name == "run.2"


def test_an_agent_with_a_memory_keeps_hints_in_its_system_prompt() -> None:
    hints = [{"text": "B.", "status": "active"}, {"text": "C.", "status": "contradicted"}]
    memory = remembered([*hints, {"text": "A.", "status": "active"}])
    system, user = remembering(
        [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hi."}], memory
    )
    assert system == {"role": "system", "content": "Help. A. B."}
    assert user["content"] == "Hi."


def test_options_name_kinds_and_objections() -> None:
    assert kinds_of("unit+order") == ("unit", "order")
    assert objections_of("until") is None
    assert objections_of("3") == 3
    for wrong in ("weather", "unit+unit", "unit+"):
        with pytest.raises(ArgumentTypeError, match="choose"):
            kinds_of(wrong)
    with pytest.raises(ArgumentTypeError, match="until"):
        objections_of("0")
