from __future__ import annotations

from pathlib import Path

from rollout_bridge.slime.saved import TRACKER, saved_rollouts, tracked_rollout
from tests.rollout_bridge.slime.saved_by_megatron import saves, starts_to_save


def test_whole_checkpoints_count_up_to_the_one_that_a_job_loads(tmp_path: Path) -> None:
    assert saved_rollouts(tmp_path / "none") == []
    assert tracked_rollout(tmp_path / "none") == -1
    saves(tmp_path, 0, 1, 3)
    starts_to_save(tmp_path, 2)
    starts_to_save(tmp_path, 4)
    assert saved_rollouts(tmp_path) == [0, 1, 3]
    (tmp_path / TRACKER).write_text("1")
    assert saved_rollouts(tmp_path) == [0, 1]
    (tmp_path / TRACKER).write_text("")
    assert saved_rollouts(tmp_path) == []
