import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.evaluation.figures.pass_at_k import mean_pass_at_k, pass_at_k


def test_worked_numbers():
    assert pass_at_k(10, 3, 4) == pytest.approx(5 / 6)
    assert pass_at_k(16, 2, 8) == pytest.approx(23 / 30)
    assert pass_at_k(10, 3, 8) == 1.0
    assert mean_pass_at_k([(0, 4), (4, 4)], 2) == 0.5


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, n)] * 2)))
def test_it_is_a_probability_that_grows_with_k_and_is_c_over_n_at_1(sizes):
    n, c, k = sizes
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    if k > 1:
        assert 0.0 <= pass_at_k(n, c, k - 1) <= pass_at_k(n, c, k) + 1e-12 <= 1.0 + 1e-12


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (0, 0, 1), (4, 1, 0)])
def test_bad_counts(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_no_problems():
    with pytest.raises(ValueError, match="no problems"):
        mean_pass_at_k([], 1)
