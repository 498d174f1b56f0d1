import pytest

from records.training.staleness import admit, max_requests
from tests.trainer.golden import cases


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
