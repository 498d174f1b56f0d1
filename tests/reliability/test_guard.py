"""A learning rate that spoils the policy: the guard withdraws the version, and `opd serve` answers
as before.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.own_agent.cell import measured_cell
from benchmarks.own_agent.protocol import Cell
from rollout_bridge.guard.checks import read_checks
from tests.reliability.test_serve_learns import PROTOCOL

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1200)]

CANARIES = Path(__file__).parents[2] / "examples" / "canaries" / "tool_lab.jsonl"


async def test_a_hundredfold_learning_rate_is_stopped_within_two_versions(tmp_path: Path) -> None:
    protocol = replace(
        PROTOCOL,
        n=32,
        settings=(
            f"guard.canaries={CANARIES}",
            "trainer.learning_rate=3e-2",
            # The guard alone: obedience would stop it, too.
            "rehearsal.obedience_floor=0.01",
        ),
    )
    cell = Cell(kinds=("unit",), seed=0, objections=3)
    made = await measured_cell(cell, protocol, tmp_path)
    folder = tmp_path / "runs" / cell.name(protocol)
    start, *later = read_checks(folder)
    assert start.passed >= 0.9 * start.asked
    failed = next(row for row in later if row.breaches)
    assert failed.version <= 2
    said = " ".join(failed.breaches)
    for name in ("max_kl", "max_kl_last", "max_gap_rise"):
        assert f"(guard.{name})" in said
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    # It trains adapters, so the version never served.
    assert f"the guard did not publish version {failed.version}" in summary["training_stopped"]
    # What is served is as good as the start: no other version was trained from the bad one.
    for name in ("contrary_unit", "valid_calls", "copied_names"):
        before, after = ((hits / count) for hits, count in (made["start"][name], made["end"][name]))
        assert after >= 0.85 * before, name
