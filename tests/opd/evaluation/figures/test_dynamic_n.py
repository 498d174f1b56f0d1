import pytest

from opd.evaluation.figures.dynamic_n import StoppingRule


def test_sampling_goes_on_until_solved_or_capped():
    rule = StoppingRule(successes=2, max_tries=10)
    assert rule.next_tries(0, 0, batch=4) == 4
    assert rule.next_tries(1, 8, batch=4) == 2
    assert rule.next_tries(2, 5, batch=4) == 0
    assert rule.next_tries(0, 10) == 0
    assert rule.next_tries(0, 12) == 0


def test_bad_input():
    with pytest.raises(ValueError, match="stopping rule"):
        StoppingRule(successes=0)
    with pytest.raises(ValueError, match="batch"):
        StoppingRule().next_tries(2, 1)
