"""Open wishes, hint by hint, over the versions of a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd.rehearsal.measuring.measuring import Wish, wishes_in_turn
from opd.rehearsal.measuring.review import Review, obedience_of
from opd.rehearsal.preparing.preparing import PreparedHint
from records.hints.types import HintPrompt, HintStatus
from tests.opd.rehearsal.builders import a_hint, a_prompt, a_state, a_version, asked
from trainer.rehearsal.config import RehearsalConfig
from trainer.rehearsal.estimates import Gap, Obedience, PooledObedience, Rate
from trainer.rehearsal.journal import Journal, ObedienceRow, PooledRow

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
    asked_for = [one for version in range(5) for one in wishes_in_turn(hints, 4, version)]
    assert Counter(one.hint_id for one in asked_for[:4]) == {"h0": 2, "h1": 2}
    of_first = [one.prompt.prompt_id for one in asked_for if one.hint_id == "h0"]
    assert of_first == [f"p{number % 5}" for number in range(10)]
    assert wishes_in_turn([[]], 4, 0) == []


class Wishes:
    """Measures nothing but open wishes, of which one in two is done."""

    async def gap(self, *_: object) -> None:
        return None

    async def obedience(self, wishes: Sequence[Wish]) -> dict[str, Obedience]:
        count = len(wishes)
        return {one.hint_id: asked(count // 2, count) for one in wishes}


class Nothing:
    """A store and a memory in which nothing happened."""

    def ended(self, *_: object) -> dict[str, object]:
        return {}

    async def vote_summary(self) -> Any:
        return SimpleNamespace(accepted=0)

    async def counts(self) -> dict[str, int]:
        return {}

    lesson_counts = counts


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


def test_the_start_falls_short_by_chance_and_is_what_is_served_then(tmp_path: Path) -> None:
    nothing: Any = Nothing()
    journal = Journal(tmp_path)
    review = Review(nothing, nothing, nothing, journal, RehearsalConfig())
    pooled = PooledRow.of(PooledObedience(rate=Rate(hits=6, count=8), before=1.0, floor=0.95))
    assert pooled is not None
    assert not pooled.passed
    start, first = (a_version(at).model_copy(update={"pooled": pooled}) for at in (0, 1))
    journal.add(start)
    assert review.stop_order(start) is None
    journal.add(first)
    order = review.stop_order(first)
    assert order is not None
    assert order.serve_version == 0


class Opening(Wishes):
    """Its gap is what the test says next."""

    def __init__(self) -> None:
        self.value = 0.0

    async def gap(self, *_: object) -> Gap:
        return Gap(value=self.value, low=self.value, high=self.value, num_samples=8)


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
