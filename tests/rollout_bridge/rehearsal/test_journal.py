from records.hints.types import HintStatus
from rollout_bridge.rehearsal.journal import (
    FILE,
    GapRow,
    Journal,
    LastRow,
    MeasuredHint,
    VersionRow,
    last_row,
    read_rows,
)

GAP = GapRow(value=0.5, low=0.4, high=0.6, num_samples=16)


def a_row(version):
    hint = MeasuredHint(
        hint_id="h0",
        status=HintStatus.ACTIVE,
        gap=GAP,
        first_gap=1.0,
        held_back=True,
        num_steps=version,
        active_from=0,
    )
    return VersionRow(
        time=1.0,
        version=version,
        turns=10,
        objections=1,
        hints=(hint,),
        obedience=None,
        pooled=None,
        keep=GAP,
        lessons={"hint/ready": 4},
    )


def test_rows_come_back(tmp_path):
    assert read_rows(tmp_path) == []
    journal = Journal(tmp_path)
    journal.add(a_row(0))
    journal.add(a_row(1))
    assert read_rows(tmp_path) == journal.rows == [a_row(0), a_row(1)]


def test_a_line_that_a_kill_left_unfinished_is_no_row(tmp_path):
    Journal(tmp_path).add(a_row(0))
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write(a_row(1).model_dump_json()[:40])
    assert read_rows(tmp_path) == [a_row(0)]
    journal = Journal(tmp_path)
    journal.add(a_row(1))
    assert read_rows(tmp_path) == [a_row(0), a_row(1)]


def test_the_newest_row_is_read_alone(tmp_path):
    assert last_row(tmp_path) is None
    journal = Journal(tmp_path)
    for version in range(400):
        journal.add(a_row(version))
        if version in (0, 1, 399):
            assert last_row(tmp_path) == a_row(version)
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write(a_row(400).model_dump_json()[:100])
    assert last_row(tmp_path) == a_row(399)


def test_the_newest_row_is_read_again_when_the_file_has_grown(tmp_path, monkeypatch):
    newest = LastRow(tmp_path)
    assert newest.read() is None
    journal = Journal(tmp_path)
    for version in range(3):
        journal.add(a_row(version))
        assert newest.read() == a_row(version)
    monkeypatch.setattr("rollout_bridge.rehearsal.journal.last_row", None)
    assert newest.read() == a_row(2)
