from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from records.names import TurnState
from records.store import Store
from records.types import VersionSpan
from rollout_bridge.slime.handovers import (
    Handover,
    HandoverError,
    HandoverLog,
    step_versions,
    weight_start_version,
)
from tests.records.builders import turn_in
from tests.records.new_store import new_store


def a_record(version: int, rollout_id: int, parent: Handover | None, **changes: Any) -> Handover:
    values: dict[str, Any] = {
        "kind": "step",
        "version": version,
        "parent_version": None if parent is None else parent.version,
        "parent_hash": None if parent is None else parent.hash,
        "rollout_id": rollout_id,
        "turn_ids": (f"turn-{version}",),
        "staleness": (0,),
        "created_at": 1000.0 + version,
    }
    return Handover(**{**values, **changes})


def a_start(version: int, rollout_id: int, parent: Handover | None) -> Handover:
    return a_record(version, rollout_id, parent, kind="start", turn_ids=(), staleness=())


@pytest.fixture
def log(tmp_path: Path) -> HandoverLog:
    return HandoverLog(tmp_path)


def written(log: HandoverLog, *records: Handover) -> list[Handover]:
    for record in records:
        log.write(record)
    return list(records)


def test_the_chain_ends_at_the_rollout_of_the_checkpoint(log: HandoverLog) -> None:
    start = a_start(1, -1, None)
    first = a_record(2, 0, start)
    second = a_record(3, 1, first)
    written(log, start, first, second)
    assert log.chain(-1) == [start]
    assert log.chain(0) == [start, first]
    assert log.chain(1) == [start, first, second]
    assert log.highest_version() == 3


def test_a_rollout_that_was_trained_again_counts_as_it_was_trained_last(log: HandoverLog) -> None:
    start = a_start(1, -1, None)
    lost = a_record(3, 1, kept := a_record(2, 0, start))
    again = a_record(5, 1, restart := a_start(4, 0, kept))
    written(log, start, kept, lost, restart, again)
    assert log.chain(1) == [start, kept, restart, again]
    assert step_versions(log.chain(1)) == [0, 2, 5]
    # A job that died before it handed anything over leaves only its start.
    assert log.chain(0) == [start, kept, restart]


def test_an_empty_log_knows_nothing_of_any_checkpoint(log: HandoverLog) -> None:
    assert log.chain(-1) == log.chain(7) == []
    assert log.highest_version() == 0
    assert step_versions([]) == [0]


def test_a_checkpoint_that_the_records_do_not_reach_is_refused(log: HandoverLog) -> None:
    written(log, start := a_start(1, -1, None), a_record(2, 0, start))
    with pytest.raises(HandoverError, match="records end at rollout 0"):
        log.chain(5)


@pytest.mark.parametrize("harm", ["missing", "changed", "damaged"])
def test_a_broken_chain_is_refused(log: HandoverLog, harm: str) -> None:
    start = a_start(1, -1, None)
    first = a_record(2, 0, start)
    written(log, start, first, a_record(3, 1, first))
    path = log.folder / "v000000002.json"
    if harm == "missing":
        path.unlink()
    elif harm == "changed":
        path.write_bytes(a_record(2, 0, start, turn_ids=("another",)).to_bytes())
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(HandoverError, match=r"missing or changed|not a readable record"):
        log.chain(1)


def test_a_record_is_never_overwritten(log: HandoverLog) -> None:
    written(log, a_start(1, -1, None))
    with pytest.raises(FileExistsError):
        log.write(a_start(1, 4, None))
    assert [path.name for path in log.folder.iterdir()] == ["v000000001.json"]


def test_the_stored_version_names_megatrons_folder(log: HandoverLog) -> None:
    record = a_record(2, 12, a_start(1, -1, None))
    version = record.policy_version(Path("save"))
    assert (version.version, version.parent_version) == (2, 1)
    assert version.checkpoint == "save/iter_0000012"
    assert version.manifest_hash == record.hash
    assert a_start(1, -1, None).policy_version(Path("save")).checkpoint == "start"


async def test_the_next_job_counts_on_from_every_label_that_was_used(tmp_path: Path) -> None:
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        assert await weight_start_version(store, tmp_path) == 0
        HandoverLog(tmp_path).write(a_record(3, 0, None))
        assert await weight_start_version(store, tmp_path) == 3
        spans = (VersionSpan(version=8, start=0, end=3),)
        await turn_in(store, TurnState.READY, version_spans=spans)
        assert await weight_start_version(store, tmp_path) == 8


def test_each_turn_has_a_staleness() -> None:
    with pytest.raises(ValueError, match="one staleness per turn"):
        a_record(1, 0, None, staleness=())


def test_a_record_without_lessons_is_what_it_was_before_there_were_any(log: HandoverLog) -> None:
    [start, step] = written(log, first := a_start(1, -1, None), a_record(2, 0, first))
    assert b"lesson" not in step.to_bytes()
    third = a_record(3, 1, step, lesson_ids=("lesson-1", "lesson-2"))
    written(log, third)
    assert log.chain(1) == [start, step, third]


def test_a_start_may_restore_an_older_version_and_a_step_may_not(log: HandoverLog) -> None:
    start = a_start(1, -1, None)
    [*_, step] = written(log, start, a_record(2, 0, start))
    back = a_record(3, -1, step, kind="start", turn_ids=(), staleness=(), restores=start.version)
    assert b"restores" not in step.to_bytes()
    written(log, back)
    assert log.chain(-1) == log.newest_chain() == [start, step, back]
    assert log.newest_chain(2) == [start, step]
    assert back.policy_version(Path("save")).restores == 1
    with pytest.raises(ValueError, match="only a start"):
        a_record(4, 1, back, restores=1)


def test_a_new_run_has_no_newest_chain(log: HandoverLog) -> None:
    assert log.newest_chain() == []
