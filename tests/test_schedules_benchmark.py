"""The benchmark of schedules: its runs are the lab's, and its table says what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.schedules import HEADINGS, draw, row_of, schedules, table
from examples.tool_lab.__main__ import app


@pytest.mark.parametrize("name", ["sync", "step_off_2", "async"])
def test_the_lab_takes_the_words_of_each_schedule(name: str, tmp_path: Path) -> None:
    words = [*schedules([2])[name], "--pause-s", "0.2", "--run", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "already exists" in result.output, "all but the folder is right"


def test_an_unknown_schedule_is_refused_before_anything_starts(tmp_path: Path) -> None:
    words = ["--schedule", "later", "--run", str(tmp_path / "new")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--schedule: input should be 'sync', 'step_off' or 'async'" in result.output
    assert not (tmp_path / "new").exists()


def test_a_row_says_what_a_run_measured(tmp_path: Path) -> None:
    summary = {
        "learning": {"steps": {"generation_held": {"seconds": 12.3}}},
        "seconds_by_phase": {"learning": 60.0},
        "updates": 2,
        "reached_updates": True,
        "dropped": {"stale": 7},
        "success_before": 0.05,
        "success_after": 0.95,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"skipped": None, "staleness_mean": 0.0, "staleness_max": 0},
        {"skipped": "below_noise", "staleness_mean": 9.0, "staleness_max": 9},
        {"skipped": None, "staleness_mean": 0.5, "staleness_max": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = row_of("step_off_1", 3, tmp_path)
    assert row == ("step_off_1", "3", "2", "60", "30.0", "0.25", "1", "7", "12", "0.05", "0.95")
    assert table([HEADINGS, row]).splitlines()[0].startswith("schedule    seed  updates")
    draw([row], tmp_path / "one.svg")
    assert "step_off_1, seed 3" in (tmp_path / "one.svg").read_text()


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    summary = {
        "learning": {"steps": {"generation_held": None}},
        "seconds_by_phase": {"learning": 9.0},
        "updates": 0,
        "reached_updates": False,
        "dropped": {},
        "success_before": 0.05,
        "success_after": 0.05,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text("")
    row = row_of("async", 0, tmp_path)
    assert row[2:9] == ("0 (not all)", "9", "-", "-", "-", "0", "0")
