import json
from pathlib import Path

import pytest

from rollout_bridge.engine.errors import EngineUnavailable
from rollout_bridge.engine.served import (
    STAGED_FILE,
    AdapterRef,
    ServedFile,
    ServedVersion,
    StagedFirst,
)


def version(run: Path, number: int) -> ServedVersion:
    folder = run.resolve() / "checkpoints" / f"step_{number:06d}"
    return ServedVersion(
        label=str(number), adapter=AdapterRef(name=f"opd-v{number:06d}-abc", path=str(folder))
    )


def test_every_reader_sees_what_was_written_last(tmp_path):
    writer, reader = ServedFile(tmp_path), ServedFile(tmp_path)
    assert reader.current() is None
    for number in (1, 2, 3):
        writer.write(version(tmp_path, number))
        assert reader.current() == writer.current() == version(tmp_path, number)
    writer.write(ServedVersion(label="0"))
    assert reader.current() == ServedVersion(label="0")
    writer.remove()
    assert reader.current() is None
    writer.remove()


def test_a_moved_run_folder_names_its_adapters_where_they_are(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    ServedFile(old).write(version(old, 4))
    old.rename(new)
    assert ServedFile(new).current() == version(new, 4)


def test_it_is_read_only_when_it_was_written_anew(tmp_path, monkeypatch):
    ServedFile(tmp_path).write(version(tmp_path, 1))
    reader = ServedFile(tmp_path)
    first = reader.current()
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("read again"))
    assert reader.current() is first


@pytest.mark.parametrize(
    "content", ["", "{", "[]", json.dumps({"version": "x", "adapter": None, "folder": None})]
)
def test_a_damaged_file_is_one_line_until_it_is_mended(tmp_path, content):
    (tmp_path / "served.json").write_text(content)
    reader = ServedFile(tmp_path)
    with pytest.raises(EngineUnavailable, match=r"served.json: cannot be read .*rewrites it"):
        reader.current()
    ServedFile(tmp_path).write(version(tmp_path, 1))
    assert reader.current() == version(tmp_path, 1)


def test_a_check_asks_what_is_staged_and_else_what_serves(tmp_path):
    served, staged = ServedFile(tmp_path), ServedFile(tmp_path, STAGED_FILE)
    choice = StagedFirst(tmp_path)
    assert choice.current() is None
    served.write(version(tmp_path, 1))
    assert choice.current() == version(tmp_path, 1)
    assert not choice.is_unserved(1)
    staged.write(version(tmp_path, 2))
    assert choice.current() == version(tmp_path, 2)
    assert served.current() == version(tmp_path, 1)
    assert choice.is_unserved(2)
    served.write(version(tmp_path, 2))
    assert not choice.is_unserved(2), "somebody pinned it"
    staged.remove()
    assert choice.current() == version(tmp_path, 2)
