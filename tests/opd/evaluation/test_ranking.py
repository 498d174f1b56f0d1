"""The order of versions by pass@k, where it is known."""

from __future__ import annotations

from opd.evaluation.figures.estimates import (
    AdaptivePasses,
    Passes,
    estimate_adaptive,
    estimate_passes,
)
from opd.evaluation.ranking import Ranking, rankings

TASKS = 40
SAMPLES = 4
NARROW = {f"task-{one}": (SAMPLES if one < TASKS // 2 else 0, SAMPLES) for one in range(TASKS)}
"""Half of the tasks pass always, the others never."""
WIDE = {f"task-{one}": (1 + (one % 8 == 0), SAMPLES) for one in range(TASKS)}
"""Each task passes now and then."""


def passes(counts: dict[str, tuple[int, int]]) -> dict[str, Passes]:
    return {"right": estimate_passes(counts, [1, SAMPLES], seed=0)}


def ranked(**adaptive: dict[str, AdaptivePasses]) -> list[Ranking]:
    of = {7: passes(NARROW), 3: passes(WIDE)}
    by_version = {7: adaptive["narrow"], 3: adaptive["wide"]} if adaptive else None
    return rankings(of, ["right"], SAMPLES, by_version)


def test_the_order_turns_where_many_tries_count() -> None:
    found = {one.k: one for one in ranked()}
    assert list(found) == [1, 4, 16, 64, 256, 1024]
    assert found[1].order == [7, 3]
    assert dict(found[1].versions)[7] == 0.5
    assert found[4].order == [3, 7]
    assert [one.order for one in found.values() if one.is_fitted] == [[3, 7]] * 4
    assert dict(found[1024].versions)[3] > 0.999
    assert dict(found[1024].versions)[7] < 0.75


def test_a_fit_without_a_maximum_is_named_where_it_is_used() -> None:
    mixed = {task: (place % (SAMPLES + 1), SAMPLES) for place, task in enumerate(NARROW)}
    none = dict.fromkeys(NARROW, (0, SAMPLES))
    found = rankings({7: passes(mixed), 2: passes(none)}, ["right"], SAMPLES, None)
    assert [list(one.at_the_edge) for one in found] == [[], [], [2], [2], [2], [2]]


def test_further_tries_count_at_larger_k_alone() -> None:
    solved = {task: (c or 1, n if c else 64) for task, (c, n) in NARROW.items()}
    narrow = {"right": estimate_adaptive(solved, [64], seed=0)}
    wide = {"right": estimate_adaptive(WIDE, [64], seed=0)}
    before, after = ranked(), ranked(narrow=narrow, wide=wide)
    assert after[0] == before[0]
    at = dict(after[-1].versions)[7]
    assert at > 0.9 > dict(before[-1].versions)[7]


def test_equal_versions_stay_in_the_order_asked_for() -> None:
    of = {5: passes(WIDE), 9: passes(WIDE)}
    assert all(one.order == [5, 9] for one in rankings(of, ["right"], SAMPLES, None))
