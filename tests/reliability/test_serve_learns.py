"""`opd serve` as documented: three objections over HTTP become a wish that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.own_agent.cell import measured_cell
from benchmarks.own_agent.protocol import Cell, Protocol
from benchmarks.own_agent.serving import log_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1200)]

PROTOCOL = Protocol(
    quiet_sessions=12,
    sessions=30,
    n=64,
    pace=1.0,
    wait_s=300.0,
    steady_s=90.0,
    every=10,
    model="0",
    words="0",
)


async def test_three_objections_teach_a_wish_and_open_requests_are_still_followed(
    tmp_path: Path,
) -> None:
    cell = Cell(kinds=("unit",), seed=0, objections=3)
    made = await measured_cell(cell, PROTOCOL, tmp_path)
    assert made["objecting"]["objections"] == {"unit": 3}

    store = made["store"]
    assert store["version"] >= 1
    assert {"hint trained", "counter trained", "keep trained"} <= store["lessons"].keys()
    assert store["practised"] >= 1
    start, end = _rates(made["start"]), _rates(made["end"])
    assert start["wanted_unit"] < 0.4
    assert end["wanted_unit"] >= 0.8
    assert end["contrary_unit"] >= 0.85 * start["contrary_unit"]

    # It says so: a version that was measured, and what was learned, where people look.
    folder = tmp_path / "runs" / cell.name(PROTOCOL)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["policy_version"] == store["version"]
    assert summary["training_stopped"] is None
    assert summary["measured"]["obedience"]["value"] > 0.85
    assert max(one["lessons_trained"]["hint"] for one in summary["hints"]) > 0
    assert "open wishes done" in log_of(folder).read_text(encoding="utf-8")


def _rates(counts: dict[str, list[int]]) -> dict[str, float]:
    return {name: hits / count for name, (hits, count) in counts.items()}
