import pytest

from opd.rehearsal.measuring.fate import fate_of
from records.hints.types import HintStatus
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import Gap, PooledObedience, Rate, Uptake
from tests.opd.rehearsal.builders import a_hint

CONFIG = RehearsalConfig(max_steps=10)


def a_gap(value, high=None):
    return Gap(value=value, low=value / 2, high=value if high is None else high, num_samples=16)


@pytest.mark.parametrize(
    ("status", "steps", "gap", "expected"),
    [
        (HintStatus.ACTIVE, 3, a_gap(0.05, 0.1), HintStatus.RESTING),
        (HintStatus.ACTIVE, 3, a_gap(0.05, 0.11), None),
        (HintStatus.ACTIVE, 3, None, None),
        (HintStatus.ACTIVE, 10, a_gap(0.5), HintStatus.STUCK),
        (HintStatus.ACTIVE, 10, a_gap(0.05), HintStatus.RESTING),
        (HintStatus.ACTIVE, 10, None, HintStatus.STUCK),
        (HintStatus.RESTING, 10, a_gap(0.3), None),
        (HintStatus.RESTING, 10, a_gap(0.31), HintStatus.ACTIVE),
        (HintStatus.RESTING, 10, None, None),
    ],
)
def test_a_hint_rests_wakes_and_is_given_up(status, steps, gap, expected):
    hint = a_hint(status=status, num_steps=steps, first_gap=1.0)
    fate = fate_of(hint, gap, 1.0, 0, CONFIG)
    assert (fate and fate.status) == expected


def test_steps_count_from_when_it_woke():
    hint = a_hint(num_steps=18, first_gap=1.0)
    assert fate_of(hint, a_gap(0.5), 1.0, 12, CONFIG) is None
    fate = fate_of(hint, a_gap(0.5), 1.0, 8, CONFIG)
    assert fate is not None
    assert fate.status is HintStatus.STUCK


def test_what_has_nothing_to_teach_rests_at_once():
    fate = fate_of(a_hint(), a_gap(5e-4), 5e-4, 0, CONFIG)
    assert fate is not None
    assert fate.status is HintStatus.RESTING


def done(hits: int, count: int = 64) -> PooledObedience:
    return PooledObedience(rate=Rate(hits=hits, count=count), before=1.0, floor=0.95)


def test_a_hint_goes_on_while_open_wishes_are_not_done() -> None:
    assert fate_of(a_hint(), a_gap(0.01), 1.0, 0, CONFIG, done(60)) is None
    for obedience in (done(61), None):
        fate = fate_of(a_hint(), a_gap(0.01), 1.0, 0, CONFIG, obedience)
        assert fate is not None
        assert fate.status is HintStatus.RESTING


def test_a_hint_wakes_when_open_wishes_against_it_are_lost() -> None:
    hint = a_hint(status=HintStatus.RESTING, first_gap=1.0)
    assert fate_of(hint, a_gap(0.01), 1.0, 0, CONFIG, done(60)) is None  # perhaps by chance
    fate = fate_of(hint, a_gap(0.01), 1.0, 0, CONFIG, done(50))
    assert fate is not None
    assert fate.status is HintStatus.ACTIVE
    assert "0.78 of 64 answers, of 1.00 before" in fate.detail


def test_nothing_rests_at_a_version_that_has_lost_open_wishes() -> None:
    """The last step before all hints rest is followed by none that could give them back."""
    for obedience in (done(61), None):
        assert (
            fate_of(a_hint(), a_gap(0.01), 1.0, 0, CONFIG, obedience, version_obeys=False) is None
        )


@pytest.mark.parametrize(
    ("gap", "earlier", "expected"),
    [
        (0.40, [0.41, 0.40, 0.40, 0.41, 0.40], HintStatus.RESTING),
        (0.40, [0.40, 0.41, 0.40, 0.40], None),  # it may fall yet
        (0.40, [0.60, 0.50, 0.45, 0.42, 0.41], None),  # it falls
        (0.80, [0.80, 0.81, 0.80, 0.80, 0.80], None),  # most of it is left
    ],
)
def test_a_gap_that_falls_no_more_lets_a_hint_rest(gap, earlier, expected):
    fate = fate_of(a_hint(), a_gap(gap, 0.9), 1.0, 0, CONFIG, earlier=earlier)
    assert (fate and fate.status) == expected


@pytest.mark.parametrize(
    ("hits", "hinted", "expected"),
    [(24, 48, None), (39, 48, HintStatus.RESTING), (2, 4, HintStatus.RESTING)],
)
def test_a_gap_that_falls_no_more_means_little_before_the_hint_is_taken_up(hits, hinted, expected):
    """Unless the hint itself does no more than chance."""
    uptake = Uptake(
        now=Rate(hits=hits, count=48),
        start=Rate(hits=2, count=48),
        hinted=Rate(hits=hinted, count=48),
    )
    fate = fate_of(a_hint(), a_gap(0.5), 1.0, 0, CONFIG, earlier=[0.5] * 5, uptake=uptake)
    assert (fate and fate.status) == expected


def test_it_wakes_when_its_gap_is_wider_than_it_was_at_rest():
    hint = a_hint(status=HintStatus.RESTING, first_gap=1.0)
    assert fate_of(hint, a_gap(0.45), 1.0, 0, CONFIG, rested_at=0.4) is None
    fate = fate_of(hint, a_gap(0.55), 1.0, 0, CONFIG, rested_at=0.4)
    assert fate is not None
    assert fate.status is HintStatus.ACTIVE
