import pytest

from opd.evaluation.figures.beta_binomial import BetaBinomial
from opd.evaluation.figures.dynamic_n import StoppingRule, expected_pass_at_k


def test_sampling_goes_on_until_solved_or_capped():
    rule = StoppingRule(successes=2, max_tries=10)
    assert rule.next_tries(0, 0, batch=4) == 4
    assert rule.next_tries(1, 8, batch=4) == 2
    assert rule.next_tries(2, 5, batch=4) == 0
    assert rule.next_tries(0, 10) == 0
    assert rule.next_tries(0, 12) == 0


def test_estimates_come_from_the_posterior_not_from_the_ratio():
    prior = BetaBinomial(alpha=1.0, beta=1.0)
    # A first try that succeeds is not certainty.
    assert expected_pass_at_k(prior, [(1, 1)], 1) == pytest.approx(2 / 3)
    assert expected_pass_at_k(prior, [(1, 1), (0, 1)], 1) == pytest.approx(0.5)


def test_bad_input():
    with pytest.raises(ValueError, match="stopping rule"):
        StoppingRule(successes=0)
    with pytest.raises(ValueError, match="batch"):
        StoppingRule().next_tries(2, 1)
    with pytest.raises(ValueError, match="no problems"):
        expected_pass_at_k(BetaBinomial(alpha=1.0, beta=1.0), [], 1)
