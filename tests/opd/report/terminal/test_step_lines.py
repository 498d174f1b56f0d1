"""`serve` says a line for each step."""

from __future__ import annotations

import json
from pathlib import Path

from opd.report.terminal.step_lines import StepLines, shown_step

ROW = {
    "step": 3,
    "version": 4,
    "skipped": None,
    "turns": 24.0,
    "turns/live": 9,
    "loss": None,
    "hints/gap": 0.1234,
    "staleness_max": 2,
    "seconds/step": 61.04,
}


def test_a_step_is_a_line_without_what_was_not_measured() -> None:
    assert shown_step(ROW) == (
        "step 3, version 4: 24 samples (9 turns of agents), gap 0.123 nats, at most 2 versions "
        "stale, 61.0 s"
    )


def test_a_batch_that_taught_nothing_says_why() -> None:
    words = "no step: the batch was dropped (below_noise)"
    assert shown_step({**ROW, "skipped": "below_noise"}) == words


def test_each_step_is_said_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    steps = StepLines(tmp_path)
    assert steps.new() == []
    line = json.dumps({**ROW, "step": 4}) + "\n"
    with file.open("a") as out:
        out.write(line[:30])
        out.flush()
        assert steps.new() == []
        out.write(line[30:] + line.replace('"step": 4', '"step": 5'))
    assert [one.split(",")[0] for one in steps.new()] == ["step 4", "step 5"]
    assert steps.new() == []
