"""What is built of arrays that do not fit together is refused, with what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from records.tables.arrays import experts_from_bytes, experts_to_bytes
from records.types import UNSCORED, ReadySample, Score, SideSamples, Teaching, Verdict, VersionSpan
from tests.records.builders import a_score, a_turn, a_verdict


def floats(*shape: int, value: float = -0.5) -> np.ndarray:
    return np.full(shape, value, dtype=np.float32)


def ids(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def a_sample(**changes: Any) -> ReadySample:
    values: dict[str, Any] = {
        "turn_id": "t",
        "session_id": "s",
        "prompt_ids": ids(4),
        "response_ids": ids(3),
        "rollout_logprobs": floats(3),
        "teacher_logprobs": floats(3),
        "temperature": 1.0,
        "distribution_modified": None,
        "version_spans": (VersionSpan(version=0, start=0, end=3),),
        "hint": "",
        "created_at": 0.0,
    }
    return ReadySample(**{**values, **changes})


def a_teaching(**changes: Any) -> Teaching:
    values: dict[str, Any] = {
        "candidate": 0,
        "hint": "h",
        "teacher": "t",
        "teacher_version": "0",
        "hinted_prompt_ids": ids(5),
    }
    return Teaching(**{**values, **changes})


def some_side_samples(length: int = 3, **changes: Any) -> SideSamples:
    values: dict[str, Any] = {
        "ids": ids(length, 2),
        "rollout_logprobs": floats(length, 2),
        "teacher_logprobs": floats(length, 2),
        "policy_version": 4,
    }
    return SideSamples(**{**values, **changes})


def test_a_sample_needs_nothing_but_its_tokens() -> None:
    sample = a_sample()
    assert (sample.after_tool, sample.reward, sample.teachings) == (False, None, ())
    assert (sample.routed_experts, sample.side_samples) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teachings": (a_teaching(teacher_logprobs=floats(2)),)}, "candidate 0 has 2 teacher"),
        ({"teachings": (a_teaching(topk_ids=ids(3, 2)),)}, "belong together"),
        (
            {"teachings": (a_teaching(topk_ids=ids(3, 2), topk_logprobs=floats(3, 1)),)},
            r"one shape \[3, K\]",
        ),
        (
            {"teachings": (a_teaching(topk_ids=ids(2, 2), topk_logprobs=floats(2, 2)),)},
            r"one shape \[3, K\]",
        ),
        ({"side_samples": some_side_samples(2)}, "at 2 positions of 3"),
        ({"routed_experts": np.zeros((7, 1, 2), dtype=np.int16)}, r"\[6, layers, topk\]"),
        ({"routed_experts": np.zeros((6, 1, 2), dtype=np.int64)}, "int16 or int32"),
        ({"routed_experts": np.zeros((6, 2), dtype=np.int16)}, r"\[6, layers, topk\]"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_sample(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ids(3, 1)}, r"one shape \[R, m\]"),
        ({"ids": ids(6), "rollout_logprobs": floats(6), "teacher_logprobs": floats(6)}, "shape"),
        (
            {"ids": ids(3, 0), "rollout_logprobs": floats(3, 0), "teacher_logprobs": floats(3, 0)},
            "one shape",
        ),
        ({"rollout_logprobs": floats(3, 2, value=np.nan)}, "rollout log-prob is not finite"),
        ({"teacher_logprobs": floats(3, 2, value=-np.inf)}, "teacher log-prob is infinite"),
    ],
)
def test_side_samples_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        some_side_samples(**changes)


def test_side_samples_may_wait_for_their_teacher() -> None:
    assert np.isnan(
        some_side_samples(teacher_logprobs=floats(3, 2, value=np.nan)).teacher_logprobs[0, 0]
    )


def test_a_verdict_with_a_hint_has_it_as_its_only_candidate() -> None:
    assert a_verdict("t", "a hint of some length").candidates == ("a hint of some length",)
    assert a_verdict("t", None).candidates == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hint": "b", "candidates": ("a", "b")}, "first candidate must be the selected hint"),
        ({"hint": None, "candidates": ("a",)}, "first candidate must be the selected hint"),
        ({"hint": "a", "candidates": ("a", "a")}, "candidate twice"),
        ({"hint": "a", "reward": float("nan")}, "not finite"),
    ],
)
def test_a_verdict_that_contradicts_itself_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Verdict(**{"turn_id": "t", "votes": (), "selection": "s", "judge": "j", **changes})


def test_only_a_teacher_with_a_version_has_log_probs() -> None:
    with pytest.raises(ValueError, match="teacher without a version"):
        a_score("t", teacher_version=UNSCORED)
    unscored = a_score("t", teacher_version=UNSCORED, teacher_logprobs=floats(3, value=np.nan))
    assert isinstance(unscored, Score)


@pytest.mark.parametrize("shape", [(5, 1, 2), (6, 3), (0, 1, 2)])
def test_a_turn_with_experts_of_other_tokens_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="routed experts"):
        a_turn("s", routed_experts=np.zeros(shape, dtype=np.int16))


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_experts_come_back_from_bytes_with_shape_and_width(dtype: Any) -> None:
    experts = np.arange(-3, 21, dtype=dtype).reshape(4, 3, 2)
    back = experts_from_bytes(experts_to_bytes(experts))
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, experts)
    with pytest.raises(ValueError, match="reshape"):
        experts_from_bytes(experts_to_bytes(experts)[: -np.dtype(dtype).itemsize])
    with pytest.raises(ValueError, match="too few"):
        experts_from_bytes(b"\x02")
