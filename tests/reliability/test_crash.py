"""The short form of the crash test: `python -m tests.reliability.crash` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.reliability.crash import crash
from tests.reliability.kill_plan import FAIL_POINTS, POINTS_WITH_LESSONS, KillPlan

pytestmark = pytest.mark.long

KILLS_EACH = 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2])
async def test_kills_lose_nothing_repeat_nothing_and_leave_nothing_stuck(
    tmp_path: Path, workers: int
) -> None:
    plan = KillPlan(dict.fromkeys(FAIL_POINTS, KILLS_EACH), 0, random.Random(1))
    run = await crash(tmp_path, None, plan, seed=1, tell=lambda _: None, workers=workers)
    assert all(plan.counted(process) >= KILLS_EACH for process in FAIL_POINTS)
    assert run.findings.num_acknowledged > 0
    assert run.findings.are_none, run.findings


@pytest.mark.timeout(1800)
async def test_kills_lose_no_lesson_and_repeat_none(tmp_path: Path) -> None:
    wanted = {"proxy": 0, "judge": 2 * KILLS_EACH, "trainer": 2 * KILLS_EACH}
    plan = KillPlan(wanted, 0, random.Random(2), POINTS_WITH_LESSONS)
    run = await crash(tmp_path, None, plan, seed=2, tell=lambda _: None, rehearses=True)
    assert all(plan.counted(process) >= count for process, count in wanted.items())
    assert run.findings.num_lessons > 0
    assert run.findings.are_none, run.findings
