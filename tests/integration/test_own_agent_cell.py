"""A cell of the benchmark with people of its own is a run of `opd serve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.own_agent.cell import measured_cell
from benchmarks.own_agent.protocol import Cell
from benchmarks.own_agent.table import table
from tests.test_own_agent_benchmark import PROTOCOL


@pytest.mark.long
async def test_a_cell_is_a_run_of_serve_from_its_start_to_its_end(tmp_path: Path) -> None:
    protocol = replace(PROTOCOL, quiet_sessions=1, n=2)
    cell = Cell(kinds=("title",), seed=0, objections=1)
    made = await measured_cell(cell, protocol, tmp_path)
    assert made["objecting"]["objections"] == {"title": 1}
    assert made["quiet"]["objections"] == {}
    assert made["store"]["version"] == 0
    # Measuring leaves side turns alone; what people said is waited for and judged.
    assert made["store"]["drops"]["side_turn"] >= 2 * (2 * 7 + 7)
    assert made["end"]["wanted_title"][1] == made["start"]["contrary_room"][1] == 2
    assert table([made]).splitlines()[-1].startswith("| as documented | title | 1 (1 made) | 0 |")
    assert await measured_cell(cell, protocol, tmp_path) == made
