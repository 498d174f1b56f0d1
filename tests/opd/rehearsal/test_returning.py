"""What ended hints taught goes back, and this comes to an end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from opd.rehearsal.measuring.measuring import Measurer
from opd.rehearsal.measuring.review import Review
from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.preparing.keeping import Keeping
from records.hints.types import Hint, HintStatus
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import Gap
from rollout_bridge.rehearsal.journal import Journal
from tests.opd.rehearsal.builders import a_hint, a_state

ENDED = a_hint("h0", status=HintStatus.DELETED, trained_since=1, first_gap=1.0)


class Records:
    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        return [a_state(turn_id, turn_id) for turn_id in turn_ids]

    async def num_judged(self) -> tuple[int, int]:
        return 1, 1

    async def counts(self) -> dict:
        return {}

    async def lesson_counts(self) -> dict:
        return {}

    async def is_start(self, version: int) -> bool:
        return version == 0

    async def versions_given_up(self) -> set[int]:
        return set()


class Gaps:
    """The gap to the start at any states: `high` nats at most; None: not to be measured."""

    def __init__(self, high: float | None) -> None:
        self.high = high

    async def obedience(self, wishes: object) -> dict:
        return {}

    async def keep_gap(self, turns: Sequence[TurnRecord], *_: object) -> Gap | None:
        if not turns or self.high is None:
            return None
        return Gap(value=self.high / 2, low=0.0, high=self.high, num_samples=4)


class States:
    """Where ended hints are to go back; they were looked at, unless it is None."""

    def __init__(self, states: dict[str, list[str]]) -> None:
        self.states = states

    def ended(self, ended: Sequence[Hint], hints: object) -> dict[str, list[str]]:
        return {
            one.hint_id: self.states[one.hint_id] for one in ended if one.hint_id in self.states
        }


def review(folder: Path, gaps: Gaps, states: States, max_steps: int = 3) -> Review:
    return Review(
        cast(RehearsalStore, Records()),
        cast(Measurer, gaps),
        cast(Keeping, states),
        Journal(folder),
        RehearsalConfig(max_steps=max_steps),
    )


async def test_a_hint_goes_back_until_its_gap_to_the_start_has_closed(tmp_path: Path) -> None:
    gaps = Gaps(0.5)
    one = review(tmp_path, gaps, States({"h0": ["t0", "t1"]}))
    row = await one.version(1, [], [], [ENDED])
    assert (row.returned, row.going_back) == ((), ("h0",))
    gaps.high = 0.1
    row = await one.version(2, [], [], [ENDED])
    assert (row.returned, row.going_back) == (("h0",), ())
    again = review(tmp_path, gaps, States({}))
    assert again.returned == {"h0"}, "a new process knows it"
    assert (await again.version(3, [], [], [])).returned == (), "each row says what is new"


async def test_what_cannot_be_measured_has_not_gone_back(tmp_path: Path) -> None:
    one = review(tmp_path, Gaps(None), States({"h0": ["t0"]}))
    assert (await one.version(1, [], [], [ENDED])).going_back == ("h0",)


async def test_a_hint_without_a_state_has_nothing_to_bring_back(tmp_path: Path) -> None:
    one = review(tmp_path, Gaps(0.5), States({"h0": []}))
    assert (await one.version(1, [], [], [ENDED])).returned == ("h0",)


async def test_a_hint_that_nobody_looked_at_yet_waits(tmp_path: Path) -> None:
    row = await review(tmp_path, Gaps(0.01), States({})).version(1, [], [], [ENDED])
    assert (row.returned, row.going_back) == ((), ())


async def test_it_is_given_up_after_as_many_steps_as_a_hint_has(tmp_path: Path) -> None:
    one = review(tmp_path, Gaps(0.5), States({"h0": ["t0"]}), max_steps=2)
    rows = [await one.version(number, [], [], [ENDED]) for number in (1, 2, 3)]
    assert [row.returned for row in rows] == [(), (), ("h0",)]
