"""What a cluster's run goes back to, what it says of that, and which checkpoints it sets aside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.cluster.files import custom_file
from opd.cluster.flag_check import REPOSITORY
from opd.cluster.flags import command_line
from opd.cluster.going_back import GoingBack, back_to, going_back, newest_chain, set_aside
from opd.cluster.plan import LaunchPlan, make_plan
from opd.cluster.show import show
from rollout_bridge.slime.handovers import Handover, HandoverLog
from rollout_bridge.slime.saved import TRACKER, folder_name, saved_rollouts, tracked_rollout
from rollout_bridge.stop_order import StopOrder, order_stop, stop_and_serve
from tests.opd.cluster.examples import NOWHERE
from tests.rollout_bridge.slime.saved_by_megatron import saves, starts_to_save
from tests.rollout_bridge.slime.test_handovers import a_record, a_start
from trainer.errors import StartupError
from trainer.schedule.rollback_order import order_rollback

ONE = REPOSITORY / "configs" / "qwen3_4b.toml"
SAVED = [1, 3]


def a_chain() -> list[Handover]:
    """Version 1 is the start, versions 2 to 7 are after rollouts 0 to 5."""
    chain = [a_start(1, -1, None)]
    for version in range(2, 8):
        chain.append(a_record(version, version - 2, chain[-1]))
    return chain


def restarted(chain: list[Handover], version: int, rollout_id: int, restores: int) -> Handover:
    return a_record(
        version,
        rollout_id,
        chain[-1],
        kind="start",
        turn_ids=(),
        staleness=(),
        restores=restores,
    )


def write_run(run: Path) -> list[Handover]:
    log = HandoverLog(run)
    for record in (chain := a_chain()):
        log.write(record)
    saves(run / "checkpoints", *SAVED)
    for rollout_id in SAVED:
        (run / "hf" / str(rollout_id)).mkdir(parents=True)
    return chain


def plan(run: Path) -> LaunchPlan:
    return make_plan(ONE, NOWHERE, run)


def versions(links: tuple[Handover, ...]) -> list[int]:
    return [one.version for one in links]


@pytest.mark.parametrize(
    ("wanted", "restores", "rollout_id", "lost", "gone"),
    [
        (3, 3, 1, [], [4, 5, 6, 7]),
        (4, 3, 1, [4], [5, 6, 7]),
        (6, 5, 3, [6], [7]),
        (2, 1, -1, [2], [3, 4, 5, 6, 7]),
        (1, 1, -1, [], [2, 3, 4, 5, 6, 7]),
        (0, 1, -1, [], [2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_newest_checkpoint_at_or_before_the_version_is_loaded(
    wanted: int, restores: int, rollout_id: int, lost: list[int], gone: list[int]
) -> None:
    back = back_to(wanted, a_chain(), SAVED, served=None)
    assert (back.restores, back.rollout_id) == (restores, rollout_id)
    assert versions(back.lost) == lost
    assert versions(back.withdrawn) == gone
    assert back.parent == 7


def test_a_version_that_was_never_served_is_not_withdrawn() -> None:
    back = back_to(4, a_chain(), SAVED, served=6)
    assert versions(back.withdrawn) == [5, 6]
    assert back.parent == 6
    assert back_to(4, a_chain(), SAVED, served=4).parent == 4


def test_withdrawn_versions_are_not_gone_back_to_and_their_checkpoints_are_not_used() -> None:
    chain = a_chain()
    chain.append(restarted(chain, 8, 1, restores=3))
    chain.append(a_record(9, 2, chain[-1]))
    with pytest.raises(StartupError, match=r"version 5 was withdrawn; choose 0 .* 2, 3, 9$"):
        back_to(5, chain, [1, 3], served=None)
    with pytest.raises(StartupError, match="version 12 is not in the chain"):
        back_to(12, chain, [1], served=None)
    back = back_to(9, chain, [1], served=None)
    assert (back.restores, back.rollout_id, versions(back.lost)) == (8, 1, [9])


def test_a_run_that_began_elsewhere_has_no_start_to_go_back_to() -> None:
    first = a_start(1, 40, None)
    with pytest.raises(StartupError, match="no checkpoint is that old"):
        back_to(2, [first, a_record(2, 41, first)], [], served=None)


def test_what_is_lost_and_withdrawn_is_said() -> None:
    assert back_to(4, a_chain(), SAVED, served=6).said() == [
        "goes back to version 4: the job begins with version 3, from checkpoint iter_0000001",
        "lost too, as checkpoints are cluster.save_interval steps apart: version 4; "
        "what was trained there never trains again: 1 turns",
        "withdrawn: versions 5 to 6; what was trained there never trains again: 2 turns",
    ]
    chain = a_chain()
    chain.append(a_record(8, 6, chain[-1], turn_ids=(), staleness=(), lesson_ids=("one", "two")))
    assert back_to(7, chain, [5], served=None).said() == [
        "goes back to version 7: the job begins with version 7, from checkpoint iter_0000005",
        "withdrawn: version 8; what was trained there never trains again: 0 turns, 2 lessons",
    ]


def test_an_order_is_found_wherever_it_is_and_followed_once(tmp_path: Path) -> None:
    chain = write_run(tmp_path)
    assert going_back(tmp_path) is None
    order_stop(tmp_path, StopOrder(reason="obedience fell", serve_version=6))
    back = going_back(tmp_path)
    assert back is not None
    assert back.restores == 5
    order_rollback(tmp_path, 4, served=6)
    back = going_back(tmp_path)
    assert back is not None
    assert (back.restores, back.parent) == (3, 6)
    log = HandoverLog(tmp_path)
    log.write(first := restarted(chain, 8, 1, restores=3))
    assert going_back(tmp_path) is None, "the newest job begins with these weights"
    log.write(again := a_start(9, 1, first))
    assert going_back(tmp_path) is None, "it was killed, and so was the one before"
    order_rollback(tmp_path, 8)
    assert going_back(tmp_path) is None, "it has the same weights"
    log.write(a_record(10, 2, again))
    back = going_back(tmp_path)
    assert back is not None
    assert (back.restores, versions(back.withdrawn)) == (8, [9, 10])


@pytest.mark.parametrize("text", ["best\n", "3 4 5\n", "-1\n"])
def test_an_order_that_cannot_be_followed_is_one_line(tmp_path: Path, text: str) -> None:
    write_run(tmp_path)
    (tmp_path / "rollback").write_text(text)
    with pytest.raises(StartupError, match="is not a version; delete the file"):
        plan(tmp_path)
    order_rollback(tmp_path, 99)
    with pytest.raises(StartupError, match="cannot be followed: version 99 is not in the chain"):
        plan(tmp_path)


def test_a_new_run_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there are no versions yet"):
        newest_chain(tmp_path)


def test_the_next_launch_loads_the_checkpoint_and_tells_the_job_what_it_restores(
    tmp_path: Path,
) -> None:
    write_run(tmp_path)
    assert "--ckpt-step" not in command_line(plan(tmp_path).sections)
    order_rollback(tmp_path, 4, served=6)
    made = plan(tmp_path)
    words = command_line(made.sections)
    assert words[words.index("--ckpt-step") :][:4] == ["--ckpt-step", "1", "--ref-ckpt-step", "0"]
    assert words[words.index("--load") + 1] == str(tmp_path / "checkpoints")
    custom = json.loads(custom_file(made.paths, made.config.trainer, 7, made.back))
    assert custom["hindsight_rollback"] == {"restores": 3, "parent": 6}
    text = show(made)
    assert "goes back to version 4: the job begins with version 3" in text
    assert "steps apart: version 4; " in text
    assert f"moved to {tmp_path / 'withdrawn'}: checkpoints/iter_0000003, hf/3" in text
    assert "--ckpt-step 1" in text
    assert tracked_rollout(tmp_path / "checkpoints") == 3, "a dry run changes nothing"


@pytest.mark.parametrize(("wanted", "loaded"), [(0, -1), (2, 0)])
def test_numbers_that_megatron_takes_for_none_are_left_to_its_own_file(
    tmp_path: Path, wanted: int, loaded: int
) -> None:
    write_run(tmp_path)
    saves(tmp_path / "checkpoints", 0, 3)
    order_rollback(tmp_path, wanted)
    made = plan(tmp_path)
    assert "--ckpt-step" not in command_line(made.sections)
    assert made.back is not None
    set_aside(made.back, made.paths, 8)
    assert tracked_rollout(made.paths.checkpoints) == loaded
    assert (made.paths.checkpoints / TRACKER).exists() is (loaded >= 0)


def back_to_version_4(run: Path) -> GoingBack:
    return back_to(4, newest_chain(run), saved_rollouts(run / "checkpoints"), served=None)


def test_later_checkpoints_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    write_run(tmp_path)
    starts_to_save(tmp_path / "checkpoints", 5)
    made = plan(tmp_path)
    back = back_to_version_4(tmp_path)
    for _ in range(2):
        set_aside(back, made.paths, 8)
        assert saved_rollouts(made.paths.checkpoints) == [1]
        assert back_to_version_4(tmp_path) == back, "a launch that was killed decides the same"
    aside = tmp_path / "withdrawn" / "before_v000000008"
    assert sorted(str(path.relative_to(aside)) for path in aside.glob("*/*")) == [
        "checkpoints/iter_0000003",
        "checkpoints/iter_0000005",
        "hf/3",
    ]
    assert (aside / "checkpoints" / folder_name(3) / "common.pt").read_bytes() == b"weights"
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["1"]


def test_the_guards_order_is_followed_on_a_cluster_too(tmp_path: Path) -> None:
    """With the start as the last good version there is no second order."""
    write_run(tmp_path)
    stop_and_serve(tmp_path, StopOrder(reason="the guard withdrew version 2", serve_version=0))
    back = going_back(tmp_path)
    assert back is not None
    assert back.rollout_id == -1
