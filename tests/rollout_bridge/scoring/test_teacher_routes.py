"""Which of several teachers scores a turn."""

from __future__ import annotations

import pytest

from rollout_bridge.config import ScoringConfig, TeacherRoutes

ROUTES = TeacherRoutes(
    sources={"gsm8k": "math"}, keys={"coding-agent": "code"}, tools={"run": "code", "sum": "math"}
)


@pytest.mark.parametrize(
    ("source", "key", "tools", "teacher"),
    [
        ("gsm8k", "coding-agent", ["run"], "math"),
        ("other", "coding-agent", ["sum"], "code"),
        (None, "somebody", ["sum", "run"], "code"),
        (None, None, ["sum"], "math"),
        ("other", "somebody", ["weather"], None),
        (None, None, [], None),
    ],
)
def test_source_key_and_tools_are_asked_in_this_order(
    source: str | None, key: str | None, tools: list[str], teacher: str | None
) -> None:
    assert ROUTES.teacher_of(source=source, key=key, tools=tools) == teacher


def test_a_route_to_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="routes: no teacher is called 'math'"):
        ScoringConfig(teachers={"code": "http://127.0.0.1:1"}, routes=ROUTES)
    ScoringConfig(teacher="math", teachers={"code": "http://127.0.0.1:1"}, routes=ROUTES)


@pytest.mark.parametrize(
    "given", [[], ["http://a", "ftp://b"], ["http://a", "http://a"], "a:1", ""]
)
def test_addresses_that_cannot_be_are_refused(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="teacher 'math'"):
        ScoringConfig(teachers={"math": given})


def test_one_address_or_several() -> None:
    config = ScoringConfig(teachers={"math": "http://a", "code": ["http://b", "http://c"]})
    assert config.urls_of_teacher("math") == ["http://a"]
    assert config.urls_of_teacher("code") == ["http://b", "http://c"]
