import pytest

from tests.trainer.golden import cases
from trainer.staleness import admit, max_requests, oldest_allowed, steps_since


@pytest.mark.parametrize("case", cases("staleness_limit"))
def test_golden(case):
    batch, eta, version = case["B"], case["eta"], case["version_i"]
    assert max_requests(batch_size=batch, version=version, eta=eta) == case["max_N_r"]
    for check in case["check"]:
        assert admit(check["N_r"], batch, version, eta) is check["allowed"]


def test_worked_number():
    assert admit(160, 32, 0, 4)
    assert not admit(161, 32, 0, 4)


def test_counts_that_make_no_sense():
    with pytest.raises(ValueError, match="itself"):
        admit(0, 4, 0, 0)
    with pytest.raises(ValueError, match="positive"):
        admit(1, 0, 0, 0)


@pytest.mark.parametrize(
    ("chain", "version", "steps"),
    [
        ([0], 0, 0),
        ([0, 1, 2], 0, 2),
        ([0, 1, 2], 2, 0),
        # Versions 2 and 3 were lost: no step of theirs is counted, none has a negative age.
        ([0, 1, 4, 5], 1, 2),
        ([0, 1, 4, 5], 3, 2),
        ([0, 1], 3, 0),
    ],
)
def test_age_counts_steps_of_the_surviving_chain(chain, version, steps):
    assert steps_since(chain, version) == steps


@pytest.mark.parametrize("chain", [[0], [0, 1, 2, 3], [0, 1, 4, 5, 9]])
@pytest.mark.parametrize("gap", [0, 1, 2, 7])
def test_what_expires_is_exactly_what_is_too_old(chain, gap):
    oldest = oldest_allowed(chain, gap)
    for version in range(11):
        assert (version < oldest) == (steps_since(chain, version) > gap)
