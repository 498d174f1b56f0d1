"""The plan of the crash test: nothing is left out, and what does not count does not count."""

from __future__ import annotations

import random

from tests.reliability.kill_plan import FAIL_POINTS, Kill, KillPlan

IDLE = {"commit_step.committed", "reconcile.uncommitted", "reconcile.committed", "publish.loaded"}
"""Places at which a trainer holds no row."""


def carried_out(plan: KillPlan, process: str) -> None:
    """As if each life ended where it was to end."""
    while not plan.is_done(process):
        dies_at = plan.next(process)
        point = dies_at[0] if dies_at else None
        plan.kills.append(Kill(process=process, point=point, counted=point not in IDLE))


def test_the_kills_are_shared_and_none_is_missing() -> None:
    plan = KillPlan.shared(250, 3, random.Random(0))
    assert plan.wanted == {"proxy": 100, "judge": 100, "trainer": 50}
    assert sum(KillPlan.shared(7, 0, random.Random(0)).wanted.values()) >= 7


def test_each_place_is_hit_often_enough_and_each_process_killed_often_enough() -> None:
    for process, points in FAIL_POINTS.items():
        plan = KillPlan.shared(250, 3, random.Random(0))
        carried_out(plan, process)
        assert plan.counted(process) == plan.wanted[process]
        assert all(plan.hits()[f"{process} {point}"] >= 3 for point in points)
        assert any(kill.point is None for kill in plan.kills)
    assert plan.progress()[0] == plan.wanted[process]


def test_places_that_do_not_count_are_left_alone_once_they_were_hit() -> None:
    plan = KillPlan.shared(250, 3, random.Random(0))
    carried_out(plan, "trainer")
    assert {plan.hits()[f"trainer {point}"] for point in IDLE} == {3}
    assert len(plan.kills) == plan.wanted["trainer"] + 3 * len(IDLE)


def test_a_place_that_is_never_reached_keeps_the_plan_from_being_done() -> None:
    plan = KillPlan({"judge": 0}, 1, random.Random(0))
    for point in FAIL_POINTS["judge"][1:]:
        plan.kills.append(Kill(process="judge", point=point, counted=True))
    assert not plan.is_done("judge")
    assert plan.next("judge") is not None
