"""The benchmark of staleness: what its table and its picture say of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.staleness import OBJECTIVES, draw, points, table

STALENESS = (0, 4)


@pytest.fixture
def results() -> dict:
    """Two seeds; every objective is worse by its place and by staleness."""
    found = {}
    for place, name in enumerate(OBJECTIVES):
        for staleness in STALENESS:
            for seed in (0, 1):
                # The first has all hits, as a policy that has learned.
                hits = 100 - 10 * place - 5 * staleness - (seed if place else 0)
                found[f"{name}|{staleness}|{seed}"] = {
                    "hits": hits,
                    "count": 100,
                    "kl": 0.1 * (1 + staleness) + 0.2 * seed,
                }
    return {"points": found, "variance": {"1": 4.0, "4": 1.0}}


def test_a_point_is_of_all_seeds_together(results: dict) -> None:
    rate, distances = points(results, list(OBJECTIVES)[1], 4)
    assert (rate.hits, rate.count) == (70 + 69, 200)
    assert distances == pytest.approx([0.5, 0.7])


def test_the_table_has_each_objective_and_variance_as_a_share_of_one_sample(results: dict) -> None:
    lines = table(results, STALENESS).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line}
    assert set(OBJECTIVES) <= set(rows)
    assert "0.6000" in rows[next(iter(OBJECTIVES))]
    assert lines[-1] == "| variance, of m = 1 | 1.000 | 0.250 |"


def test_the_picture_is_drawn(results: dict, tmp_path: Path) -> None:
    path = tmp_path / "staleness.svg"
    draw(results, STALENESS, path)
    assert all(name in path.read_text() for name in ("<svg", "Success after equal steps"))
