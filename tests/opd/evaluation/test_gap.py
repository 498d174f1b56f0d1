"""The gap over responses: its mean, its interval over sessions, and how it changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opd.evaluation.gap import CaseGap, change_of, gap_of


def cases(*sums: float) -> list[CaseGap]:
    """Two responses a session, the second one three times as long."""
    return [
        CaseGap(session=str(at // 2), reverse=one, forward=2 * one, num_tokens=10 + 20 * (at % 2))
        for at, one in enumerate(sums)
    ]


def test_the_mean_is_over_tokens_and_has_an_interval_over_sessions() -> None:
    found = gap_of(cases(1.0, 3.0, 2.0, 2.0, 4.0, 5.0))
    assert found.num_tokens == 120
    assert found.reverse_kl == pytest.approx(17 / 120)
    assert found.forward_kl == pytest.approx(34 / 120)
    assert found.low is not None
    assert found.high is not None
    assert found.low == pytest.approx(4 / 40)
    assert found.high == pytest.approx(9 / 40)
    of_one = gap_of(cases(1.0, 3.0))
    assert (of_one.low, of_one.high) == (None, None)


def test_a_change_is_compared_case_by_case() -> None:
    before = cases(1.0, 30.0, 2.0, 2.0, 40.0, 5.0)
    after = [replace(one, reverse=one.reverse - 0.01 * one.num_tokens) for one in before]
    after[0] = replace(after[0], reverse=before[0].reverse - 0.2)
    change = change_of(before, after)
    assert change.value == pytest.approx(-0.01 - 0.1 / 120)
    assert change.low is not None
    assert change.high is not None
    assert change.low <= change.value <= change.high < 0, "though the gaps themselves differ more"
    spread = gap_of(before)
    assert spread.low is not None
    assert spread.low < gap_of(after).reverse_kl
    with pytest.raises(ValueError, match="same responses"):
        change_of(before, before[:2])
