import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.rehearsal.estimates import MeasuredAnswer, Obedience, Rate, gap_of, pooled


def answers(*of_states):
    return [
        MeasuredAnswer(turn_id=f"t{state}", differences=np.array(values, dtype=np.float32))
        for state, of_state in enumerate(of_states)
        for values in of_state
    ]


def test_a_gap_is_a_mean_over_tokens():
    gap = gap_of(answers([[1.0, 1.0, 1.0]], [[2.0]], [[0.0, 0.0]]), seed=0)
    assert gap is not None
    assert gap.value == pytest.approx(5 / 6)
    assert gap.low < gap.value < gap.high
    assert gap.num_samples == 3


def test_a_gap_of_one_state_is_resampled_by_answers():
    gap = gap_of(answers([[1.0], [2.0], [3.0], [2.0]]), seed=0)
    assert gap is not None
    assert 1.0 <= gap.low < 2.0 < gap.high <= 3.0


def test_too_few_answers_have_no_gap():
    assert gap_of([], seed=0) is None
    assert gap_of(answers([[1.0]]), seed=0) is None
    assert gap_of(answers([[1.0], []]), seed=0) is None


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilsons_interval_holds_the_rate(count, share):
    rate = Rate(hits=round(share * count), count=count)
    low, high = rate.interval
    assert 0 <= low <= rate.value + 1e-12
    assert rate.value - 1e-12 <= high <= 1


def test_wilsons_interval_of_a_known_case():
    low, high = Rate(hits=8, count=10).interval
    assert (low, high) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))


def test_a_rate_of_nothing_is_none():
    with pytest.raises(ValueError, match="no answers"):
        _ = Rate(hits=0, count=0).value
    assert pooled([], floor=0.95) is None
    assert pooled([Obedience(followed=0, asked=0, abstained=64, before=0.0)], floor=0.95) is None


def test_obedience_is_held_against_the_start():
    good = Obedience(followed=58, asked=64, abstained=0, before=60.8)
    found = pooled([good] * 4, floor=0.95)
    assert found is not None
    assert found.before == pytest.approx(0.95)
    assert found.floor == pytest.approx(0.9025)
    assert found.passed
    fallen = Obedience(followed=20, asked=64, abstained=0, before=60.8)
    worse = pooled([good, good, fallen, fallen], floor=0.95)
    assert worse is not None
    assert not worse.passed
