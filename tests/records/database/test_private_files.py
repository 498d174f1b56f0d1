"""What holds agents' words is readable by its owner alone, also where it was not before."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from records.config import StoreConfig
from records.database.private_files import private_folder, tighten_run
from records.keys import Keys
from records.store import Store


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """The modes must not hang on the umask of whoever starts this."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_database_is_private_with_its_log_index_and_locks(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    async with await Store.open(StoreConfig.sqlite(path)) as store:
        await Keys(store, time.time).create(actor="test")
        names = {file.name for file in tmp_path.iterdir() if file.is_file()}
        assert {"records.db", "records.db-wal", "records.db-shm"} <= names
        assert {name: mode(tmp_path / name) for name in names} == dict.fromkeys(names, 0o600)


async def test_an_open_database_is_tightened_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    async with await Store.open(StoreConfig.sqlite(path)) as store:
        await Keys(store, time.time).create(actor="test")
        files = [path, Path(f"{path}-wal"), Path(f"{path}-shm")]
        for file in files:
            file.chmod(0o644)
        async with await Store.open(StoreConfig.sqlite(path)):
            assert [mode(file) for file in files] == [0o600] * 3


def test_a_new_run_folder_is_private(tmp_path: Path) -> None:
    private_folder(tmp_path / "runs" / "mine")
    assert mode(tmp_path / "runs" / "mine") == 0o700
    (tmp_path / "empty").mkdir()
    private_folder(tmp_path / "empty")
    assert mode(tmp_path / "empty") == 0o700


def test_what_an_earlier_program_left_open_is_tightened(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    for name in ("logs", "spill", "tensorboard", "checkpoints/v1", "odd"):
        (run / name).mkdir(parents=True)
    outside.write_text("x")
    files = ["records.db", "report.html", "metrics.jsonl", "logs/proxy.log", "spill/1.spill"]
    for name in [*files, "tensorboard/events", "checkpoints/v1/model"]:
        (run / name).write_text("x")
    (run / "run.sh").write_text("x")
    (run / "run.sh").chmod(0o755)
    (run / "link").symlink_to(outside)
    private_folder(run)
    folders = ["", "logs", "spill", "tensorboard", "checkpoints", "checkpoints/v1", "odd"]
    assert {name: mode(run / name) for name in folders} == dict.fromkeys(folders, 0o700)
    assert {name: mode(run / name) for name in files} == dict.fromkeys(files, 0o600)
    assert mode(run / "run.sh") == 0o700
    assert mode(outside) == 0o644


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "notes.txt").write_text("x")
    tighten_run(tmp_path)
    private_folder(tmp_path)
    assert (mode(tmp_path), mode(tmp_path / "notes.txt")) == (0o755, 0o644)
