import math

import pytest

from opd.evaluation.figures.beta_binomial import BetaBinomial, fit_beta_binomial

COUNTS = [(c, 16) for c in (0, 1, 0, 9, 16, 3, 0, 12, 15, 2, 7, 16)]


def test_worked_fit():
    fit = fit_beta_binomial(COUNTS)
    assert fit.converged
    assert fit.model.alpha == pytest.approx(0.279293, abs=1e-6)
    assert fit.model.beta == pytest.approx(0.362269, abs=1e-6)
    assert fit.log_likelihood == pytest.approx(-29.828086, abs=1e-6)
    assert fit.log_likelihood == pytest.approx(fit.model.log_likelihood(COUNTS))
    for k, expected in ((1, 0.435333), (64, 0.821495), (1024, 0.917709)):
        assert fit.model.pass_at_k(k) == pytest.approx(expected, abs=1e-6)


def test_uniform_prior_and_its_posterior():
    uniform = BetaBinomial(alpha=1.0, beta=1.0)
    for k in (0, 1, 2, 64, 1024):
        assert uniform.pass_at_k(k) == pytest.approx(k / (k + 1))
    assert uniform.posterior(3, 16) == BetaBinomial(alpha=4.0, beta=14.0)
    # A first try that succeeds is not certainty.
    assert uniform.posterior(1, 1).pass_at_k(1) == pytest.approx(2 / 3)
    # One try, uniform: both outcomes are equally likely.
    assert uniform.log_likelihood([(0, 1)]) == pytest.approx(math.log(0.5))


def test_the_maximum_is_one():
    fit = fit_beta_binomial(COUNTS)
    for factor in (0.98, 1.02):
        for model in (
            BetaBinomial(alpha=fit.model.alpha * factor, beta=fit.model.beta),
            BetaBinomial(alpha=fit.model.alpha, beta=fit.model.beta * factor),
        ):
            assert model.log_likelihood(COUNTS) < fit.log_likelihood


@pytest.mark.parametrize(
    "counts", [[(0, 16)] * 4, [(16, 16)] * 4, [(8, 16)] * 4, [(1, 2)], [(0, 4), (4, 4)]]
)
def test_counts_without_a_maximum_say_so_and_stay_finite(counts):
    fit = fit_beta_binomial(counts)
    assert not fit.converged
    assert 0.0 <= fit.model.pass_at_k(1) <= 1.0


def test_bad_input():
    for counts in ([], [(3, 2)], [(0, 0)], [(-1, 2)]):
        with pytest.raises(ValueError, match=r"no problems|counts must"):
            fit_beta_binomial(counts)
    with pytest.raises(ValueError, match="positive"):
        BetaBinomial(alpha=0.0, beta=1.0)
    with pytest.raises(ValueError, match="negative"):
        BetaBinomial(alpha=1.0, beta=1.0).pass_at_k(-1)
