"""Counting what is in a value, without walking through more of it than matters."""

from __future__ import annotations

import time
from typing import Any

import pytest

from records.privacy.json_walk import is_short


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 4),
        ({"role": "user", "content": "Hi"}, 1 + len("rolecontent") + 1 + 4 + 1 + 2),
        ([{"a": [1, None]}, "b"], 1 + (1 + 1) + (1 + 1 + 1) + (1 + 1)),
        ([], 1),
    ],
)
def test_characters_and_things_count(value: Any, size: int) -> None:
    assert is_short(value, size)
    assert not is_short(value, size - 1)


@pytest.mark.parametrize(
    "value", [[{}] * 3_000_000, ["x" * 300] * 1_000_000, {str(i): i for i in range(1_000_000)}]
)
def test_counting_stops_at_the_limit(value: Any) -> None:
    began = time.thread_time()
    assert not is_short(value, 2_000)
    assert time.thread_time() - began < 0.01


def test_no_depth_is_too_deep() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert not is_short(value, 2_000)
    assert is_short(value, 200_000)
