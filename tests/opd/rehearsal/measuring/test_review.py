"""Open wishes, hint by hint, over the versions of a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.rehearsal.measuring.measuring import Practice, Wish
from opd.rehearsal.measuring.open_wishes import obedience_of, wishes_in_turn
from opd.rehearsal.measuring.review import Review
from opd.rehearsal.preparing.preparing import PreparedHint
from records.hints.types import HintPrompt, HintStatus
from records.training.share import LessonShares
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import Gap, Obedience, Rate, is_obedient
from rollout_bridge.rehearsal.journal import Journal, ObedienceRow, RateRow, read_rows
from rollout_bridge.rehearsal.recovery import shares_after
from tests.opd.rehearsal.builders import a_hint, a_prompt, a_state, a_version, asked

CONFIG = RehearsalConfig()


def test_enough_answers_of_one_version_speak_for_it_alone() -> None:
    rows = [a_version(1, of_hints={"h0": asked(0, 32), "h1": asked(32, 32)})]
    found = obedience_of("h0", rows, asked(30, 32), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (30, 32)


def test_few_answers_are_taken_together_with_those_before() -> None:
    parts = [{"h0": asked(6, 6)}, {"h1": asked(6, 6)}, {"h0": asked(3, 6)}]
    rows = [a_version(number, of_hints=one) for number, one in enumerate(parts)]
    found = obedience_of("h0", rows, asked(4, 6), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (13, 18)
    assert found.rate.value < found.floor


def test_too_few_answers_say_nothing() -> None:
    rows = [a_version(1, of_hints={"h0": asked(1, 2), "h1": asked(1, 20)})]
    assert obedience_of("h0", rows, None, CONFIG) is None
    assert obedience_of("h2", rows, None, CONFIG) is None


def test_answers_of_long_ago_say_nothing_of_now() -> None:
    rows = [a_version(number, of_hints={"h0": asked(1, 2)}) for number in range(20)]
    found = obedience_of("h0", rows, asked(2, 2), CONFIG)
    assert found is not None
    assert (found.rate.hits, found.rate.count) == (9, 16)
    empty = [a_version(number) for number in range(20)]
    assert obedience_of("h0", [*rows, *empty], asked(2, 2), CONFIG) is None


def test_every_hint_is_asked_about_as_often_and_every_wish_in_its_turn() -> None:
    turn = a_state("t0", "What is it like in Rome?")
    hints = [
        [Wish(hint_id="h0", turn=turn, prompt=a_prompt(f"p{number}")) for number in range(5)],
        [],
        [Wish(hint_id="h1", turn=turn, prompt=a_prompt("q0"))],
    ]
    asked_for = [one for version in range(5) for one in wishes_in_turn(hints, 4, begin=4 * version)]
    assert Counter(one.hint_id for one in asked_for[:4]) == {"h0": 2, "h1": 2}
    of_first = [one.prompt.prompt_id for one in asked_for if one.hint_id == "h0"]
    assert of_first == [f"p{number % 5}" for number in range(10)]
    assert wishes_in_turn([[]], 4, begin=0) == []


class Wishes:
    """Measures nothing but open wishes, of which one in two is done."""

    async def keep_gap(self, *_: object) -> None:
        return None

    async def practice(self, *_: object) -> Practice:
        return Practice(gap=None, done=None)

    async def of_start(self, *_: object) -> tuple[Rate | None, Rate | None]:
        return None, None

    async def obedience(self, wishes: Sequence[Wish]) -> dict[str, Obedience]:
        count = len(wishes)
        return {one.hint_id: asked(count // 2, count) for one in wishes}


class Nothing:
    """A store and a memory in which nothing happened."""

    def ended(self, *_: object) -> dict[str, object]:
        return {}

    async def num_judged(self) -> tuple[int, int]:
        return 0, 0

    async def counts(self) -> dict[str, int]:
        return {}

    lesson_counts = counts

    async def is_start(self, version: int) -> bool:
        return version == 0

    async def versions_given_up(self) -> set[int]:
        return set()


def prepared(hint_id: str, *prompts: HintPrompt) -> PreparedHint:
    """One whose texts all train."""
    return PreparedHint(
        hint=a_hint(hint_id),
        training=(a_state("t", "What is the temperature?"),),
        held_back=(),
        prompts=prompts,
        wishes=(),
    )


@pytest.mark.parametrize("without_counter", [True, False])
async def test_without_a_guard_what_open_wishes_lose_is_measured_and_stops_nothing(
    without_counter: bool, tmp_path: Path
) -> None:
    config = RehearsalConfig(without_counter=without_counter)
    nothing: Any = Nothing()
    measurer: Any = Wishes()
    review = Review(nothing, measurer, nothing, Journal(tmp_path), config)
    hints = [prepared("one", a_prompt()), prepared("none")]
    row = await review.version(1, hints, [])
    assert (row.obedience, row.pooled) == (None, None)
    assert review.stop_order(row) is None
    if not without_counter:
        assert (row.unguarded_of, row.unmeasured) == ({}, ())
        return
    lost = ObedienceRow(followed=8, asked=16, abstained=0, before=16.0)
    assert row.unguarded_of == {"one": lost}
    assert row.unmeasured == ("none",)


class Answers(Wishes):
    """Of 64 open wishes so many are done (at later looks `then`, if it is given), and of so many
    the judge does not say it.
    """

    def __init__(self, followed: int, abstained: int = 0, then: Sequence[int] = ()) -> None:
        self.followed, self.abstained, self.then = followed, abstained, list(then)
        self.asked_for: list[str] = []

    async def obedience(self, wishes: Sequence[Wish]) -> dict[str, Obedience]:
        if not wishes:
            return {}
        followed = self.then.pop(0) if self.asked_for and self.then else self.followed
        self.asked_for += [one.hint_id for one in wishes]
        count = len(wishes) - self.abstained
        found = Obedience(
            followed=min(followed, count),
            asked=count,
            abstained=self.abstained,
            before=float(count),
        )
        return {wishes[0].hint_id: found}


class Abandoned(Nothing):
    """Some versions were lost."""

    def __init__(self, *versions: int) -> None:
        self.versions = versions

    async def is_start(self, version: int) -> bool:
        return version == 0

    async def versions_given_up(self) -> set[int]:
        return set(self.versions)


def guarded(hint_id: str = "h0", **changes: Any) -> PreparedHint:
    """One with a text that only measures."""
    wishes = (a_prompt(f"of_{hint_id}", hint_id=hint_id),)
    return replace(prepared(hint_id), wishes=wishes, hint=a_hint(hint_id, **changes))


def reviewed(folder: Path, answers: Answers, store: Nothing | None = None) -> Review:
    in_product: Any = store or Statuses()
    measurer: Any = answers
    nothing: Any = Nothing()
    return Review(in_product, measurer, nothing, Journal(folder), CONFIG)


async def test_the_start_falls_short_by_chance_and_is_what_is_served_then(tmp_path: Path) -> None:
    review = reviewed(tmp_path, Answers(followed=50))
    start = await review.version(0, [guarded()], [])
    assert start.pooled is not None
    assert not start.pooled.passed
    assert review.stop_order(start) is None
    first = await review.version(1, [guarded()], [])
    order = review.stop_order(first)
    assert order is not None
    assert order.serve_version == 0
    assert order.reason.startswith("open wishes are done in 0.78 of 128 answers")


@pytest.mark.parametrize(
    ("followed", "is_lost"),
    [
        ((60, 64), False),
        ((60, 61, 62), False),
        ((60, 61, 60), True),
        ((60, 55), True),
        ((58,), True),
    ],
    ids=["enough of two", "enough of three", "not of three", "clearly not of two", "nor of one"],
)
async def test_a_version_that_seems_to_have_lost_open_wishes_is_asked_until_it_is_clear(
    followed: tuple[int, ...], is_lost: bool, tmp_path: Path
) -> None:
    answers = Answers(followed[0], then=followed[1:])
    review = reviewed(tmp_path, answers)
    row = await review.version(1, [guarded()], [])
    assert row.obedience is not None
    asked_for = 64 * len(followed)
    assert (row.obedience.followed, row.obedience.asked) == (sum(followed), asked_for)
    assert row.obedience_of["h0"] == row.obedience
    assert len(answers.asked_for) == asked_for
    assert shares_after(row, LessonShares(), CONFIG.obedience_floor).hinted is not is_lost


@pytest.mark.parametrize("version", [0, 1])
async def test_nothing_is_asked_again_where_nothing_was_lost(version: int, tmp_path: Path) -> None:
    answers = Answers(followed=50 if version == 0 else 61)
    row = await reviewed(tmp_path, answers).version(version, [guarded()], [])
    assert row.obedience is not None
    assert row.obedience.asked == len(answers.asked_for) == 64


async def test_answers_that_nobody_can_judge_stop_training(tmp_path: Path) -> None:
    answers = Answers(followed=64)
    review = reviewed(tmp_path, answers)
    assert review.stop_order(await review.version(0, [guarded()], [])) is None
    answers.abstained = 64
    first = await review.version(1, [guarded()], [])
    assert review.stop_order(first) is None, "half of the last answers are judged"
    assert not is_obedient(first.obedience.obedience() if first.obedience else asked(1, 1), 0.95)
    order = review.stop_order(await review.version(2, [guarded()], []))
    assert order is not None
    assert "cannot say of 128 of 192 answers" in order.reason
    assert order.serve_version == 1


async def test_what_lost_versions_did_stops_none_that_follows_another(tmp_path: Path) -> None:
    answers = Answers(followed=64)
    review = reviewed(tmp_path, answers)
    await review.version(1, [guarded()], [])
    answers.followed = 0
    assert review.stop_order(await review.version(2, [guarded()], [])) is not None
    answers.followed = 63
    after = reviewed(tmp_path, answers, Abandoned(2))
    row = await after.version(3, [guarded()], [])
    assert after.stop_order(row) is None
    assert (row.pooled and row.pooled.count, row.deep_falls) == (128, 0)
    same = reviewed(tmp_path, answers)
    assert same.stop_order(await same.version(4, [guarded()], [])) is not None, "none is lost"


async def test_a_version_that_is_measured_again_counts_once(tmp_path: Path) -> None:
    answers = Answers(followed=64)
    review = reviewed(tmp_path, answers)
    for version, followed in ((1, 64), (2, 0), (2, 64)):
        answers.followed = followed
        row = await review.version(version, [guarded()], [])
    assert (row.pooled and (row.pooled.value, row.pooled.count), row.failure) == ((1.0, 128), None)


async def test_each_of_many_hints_is_asked_about(tmp_path: Path) -> None:
    answers = Answers(followed=1000)
    hints = [guarded(f"h{number}") for number in range(100)]
    await reviewed(tmp_path, answers).version(1, hints, [])
    assert set(Counter(answers.asked_for).values()) == {2}


async def test_one_that_was_given_up_is_held_and_has_all_its_steps_again(tmp_path: Path) -> None:
    store = Statuses()
    answers = Answers(followed=64)
    review = reviewed(tmp_path, answers, store)
    row = await review.version(1, [guarded(status=HintStatus.STUCK, num_steps=40)], [])
    assert row.obedience_of.keys() == {"h0"}
    assert [one.status for one in row.hints] == [HintStatus.STUCK]
    row = await review.version(2, [guarded(num_steps=40)], [])
    assert [(one.status, one.active_from) for one in row.hints] == [(HintStatus.ACTIVE, 40)]


class Opening(Wishes):
    """Its gap and its uptake are what the test says next."""

    def __init__(self) -> None:
        self.value = 0.0
        self.done: Rate | None = None
        self.asked_start = 0

    async def practice(self, *_: object) -> Practice:
        gap = Gap(value=self.value, low=self.value, high=self.value, num_samples=8)
        return Practice(gap=gap, done=self.done)

    async def of_start(self, *_: object) -> tuple[Rate | None, Rate | None]:
        self.asked_start += 1
        return Rate(hits=2, count=48), Rate(hits=36, count=48)


class Statuses(Nothing):
    """Keeps the status of the one hint."""

    status = HintStatus.ACTIVE

    async def set_hint_gap(self, *_: object, **__: object) -> None:
        pass

    async def set_hint_status(self, _: str, status: HintStatus, __: str) -> None:
        self.status = status

    async def drop_lessons_of(self, *_: object) -> None:
        pass


async def test_a_gap_that_opens_slowly_wakes_its_hint(tmp_path: Path) -> None:
    store, measurer = Statuses(), Opening()
    in_product: Any = store
    review = Review(in_product, measurer, in_product, Journal(tmp_path), CONFIG)  # type: ignore[arg-type]
    measurer.value, versions = 0.02, 0
    while store.status is not HintStatus.ACTIVE or versions == 0:
        hint = a_hint("h0", status=store.status, first_gap=0.3)
        await review.version(versions, [replace(prepared("h0"), hint=hint)], [])
        versions += 1
        if store.status is HintStatus.RESTING:
            measurer.value += 0.003
        assert versions < 60, "it never wakes"
    # Rested at 0.02, a tenth of the first gap more is 0.05; it wakes at twice that tenth at least.
    assert measurer.value < 0.1


async def test_a_gap_that_stops_lets_a_hint_rest_once_it_is_taken_up(tmp_path: Path) -> None:
    store, measurer = Statuses(), Opening()
    in_product: Any = store
    review = Review(in_product, measurer, in_product, Journal(tmp_path), CONFIG)  # type: ignore[arg-type]
    one = replace(prepared("h0"), hint=a_hint("h0", first_gap=0.3))
    measurer.value, measurer.done = 0.15, Rate(hits=4, count=16)
    for version in range(8):
        await review.version(version, [one], [])
    assert store.status is HintStatus.ACTIVE, "a third of the way"
    measurer.done = Rate(hits=12, count=16)
    for version in range(8, 13):
        assert store.status is HintStatus.ACTIVE
        await review.version(version, [one], [])
    assert store.status is HintStatus.RESTING
    [measured] = read_rows(tmp_path)[-1].hints
    assert measured.done_start == RateRow(hits=2, count=48)
    assert measured.done_hinted == RateRow(hits=36, count=48)
    assert measurer.asked_start == 1, "the start does not change"


async def test_uptake_that_nobody_can_judge_is_not_in_the_way(tmp_path: Path) -> None:
    store, measurer = Statuses(), Opening()
    in_product: Any = store
    review = Review(in_product, measurer, in_product, Journal(tmp_path), CONFIG)  # type: ignore[arg-type]
    one = replace(prepared("h0"), hint=a_hint("h0", first_gap=0.3))
    measurer.value = 0.15
    for version in range(6):
        await review.version(version, [one], [])
    assert store.status is HintStatus.RESTING
    assert read_rows(tmp_path)[-1].hints[0].done is None
