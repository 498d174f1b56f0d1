"""The evaluation itself: perfect and useless answers get the rates that they deserve, without any
model.
"""

import json

import pytest

from examples.tool_lab.cases import GenerationRequest
from examples.tool_lab.domain import assistant_call
from examples.tool_lab.evaluate import GROUPS, Rate, build_cases, evaluate, table, worst_success
from examples.tool_lab.names import is_held_out


def silent(requests: list[GenerationRequest], temperature: float) -> list[dict]:
    return [{"role": "assistant", "content": ""} for _ in requests]


async def test_silence_scores_nothing_and_async_generators_are_awaited():
    async def generate(requests, temperature):
        assert temperature in (1.0, 0.6)
        return silent(requests, temperature)

    rates = await evaluate(generate, 20, seed=0)
    assert rates == await evaluate(silent, 20, seed=0)
    assert all(rate.hits == 0 for rate in rates.values())
    assert worst_success(rates) == 0
    assert "success_unit" in table(rates)


async def test_a_wrong_number_of_responses_is_refused():
    with pytest.raises(ValueError, match="zip"):
        await evaluate(lambda requests, temperature: [], 2, seed=0)


def test_calls_are_scored_by_form_and_by_names():
    case = next(
        case
        for case in build_cases("other_skills", 40, 0)
        if "valid_calls" in case.checks and "get_weather" not in str(case.request.messages)
    )
    misspelt = assistant_call("get_weather", {"city": "Wrongcity"}, "c")
    scores = {name: check(misspelt) for name, check in case.checks.items()}
    assert scores["copied_entities"] is False
    unparsable = json.loads(json.dumps(misspelt))
    unparsable["tool_calls"][0]["function"]["arguments"] = "{"
    assert not any(check(unparsable) for check in case.checks.values())


def test_answers_are_scored_by_facts():
    for case in build_cases("other_skills", 60, 1):
        if "facts_in_answers" not in case.checks:
            continue
        last = json.loads(case.request.messages[-1]["content"])
        if "sky" not in last:
            continue
        call = case.request.messages[-2]["tool_calls"][0]["function"]
        city = json.loads(call["arguments"])["city"]
        assert is_held_out(city)
        check = case.checks["facts_in_answers"]
        right = f"In Celsius: {last['temp_c']} in {city}, {last['sky']}."
        assert check({"role": "assistant", "content": right})
        wrong = f"In Celsius: {last['temp_c'] + 1} in {city}, {last['sky']}."
        assert not check({"role": "assistant", "content": wrong})


def test_judge_answers_are_scored_by_decision_and_hint():
    positives = [c for c in build_cases("judge", 60, 2) if c.checks["usable_hint"]({}) is False]
    assert positives
    vague = {"content": "\\boxed{1}[HINT_START]Do it better next time.[HINT_END]"}
    for case in positives:
        assert case.checks["judge_decision"](vague)
        assert not case.checks["usable_hint"](vague)


def test_cases_are_seeded_and_groups_known():
    for group in GROUPS:
        first, second = build_cases(group, 5, 7), build_cases(group, 5, 7)
        assert [case.request for case in first] == [case.request for case in second]
        assert [case.request for case in first] != [
            case.request for case in build_cases(group, 5, 8)
        ]
    with pytest.raises(ValueError, match="unknown group"):
        build_cases("nothing", 1, 0)


def test_rates():
    rate = Rate(hits=18, count=20)
    low, high = rate.interval
    assert 0.69 < low < 0.9 < high < 0.98
    with pytest.raises(ValueError, match="no answers"):
        _ = Rate(hits=0, count=0).value
