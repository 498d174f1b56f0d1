from __future__ import annotations

import pytest

from records.training.staleness import oldest_allowed, steps_since


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
def test_age_counts_steps_of_the_surviving_chain(
    chain: list[int], version: int, steps: int
) -> None:
    assert steps_since(chain, version) == steps


@pytest.mark.parametrize("chain", [[0], [0, 1, 2, 3], [0, 1, 4, 5, 9]])
@pytest.mark.parametrize("gap", [0, 1, 2, 7])
def test_what_expires_is_exactly_what_is_too_old(chain: list[int], gap: int) -> None:
    oldest = oldest_allowed(chain, gap)
    for version in range(11):
        assert (version < oldest) == (steps_since(chain, version) > gap)
