"""A backup under load is whole, comes back where nothing is, and never overwrites anything."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from records.care.backup import BackupError, BackupFile, restore, take
from records.care.verify import verify_database
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.records.builders import recorded, turn_in
from tests.records.conftest import new_database
from tests.records.lessons.builders import a_lesson, ready_lessons


@pytest.fixture
def kind(config: StoreConfig) -> str:
    if not config.is_sqlite and shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed")
    return "sqlite" if config.is_sqlite else "postgresql"


@pytest.fixture
def target(config: StoreConfig, tmp_path: Path) -> Iterator[StoreConfig]:
    """Where nothing is yet."""
    if config.is_sqlite:
        yield StoreConfig.sqlite(tmp_path / "restored" / "records.db")
        return
    with new_database() as url:
        yield StoreConfig(url=url)


async def backed_up(config: StoreConfig, folder: Path) -> Path:
    file = folder / "backup"
    await asyncio.to_thread(take, config, file, "an-id", 12.5)
    return file


async def test_a_backup_under_load_holds_all_that_was_acknowledged_before(
    store: Store, kind: str, target: StoreConfig, tmp_path: Path
) -> None:
    before = [await turn_in(store, TurnState.TRAINED), await recorded(store)]
    stop = asyncio.Event()

    async def write() -> int:
        number = 0
        while not stop.is_set():
            await recorded(store)
            number += 1
        return number

    writers = [asyncio.create_task(write()) for _ in range(4)]
    file = await backed_up(store.config, tmp_path)
    stop.set()
    assert sum(await asyncio.gather(*writers)) > 0
    made = BackupFile.read(file)
    assert (made.kind, made.backup_id, made.created_at) == (kind, "an-id", 12.5)
    assert file.stat().st_mode & 0o777 == 0o600
    await came_back(file, target, before)


async def came_back(file: Path, target: StoreConfig, turn_ids: list[str]) -> None:
    await restore(file, target)
    assert await verify_database(target) == []
    async with await Store.open(target) as restored:
        for turn_id in turn_ids:
            assert await restored.has_turn(turn_id)
    with pytest.raises(BackupError, match="nothing is overwritten"):
        await restore(file, target)


async def test_hints_and_lessons_come_back(
    store: Store, kind: str, target: StoreConfig, tmp_path: Path
) -> None:
    [ready] = await ready_lessons(store)
    [waiting] = [a_lesson(await recorded(store))]
    await store.add_lessons([waiting])
    await turn_in(store, TurnState.READY)
    hints = await store.hints()
    assert hints
    before = await store.lesson(ready)
    file = await backed_up(store.config, tmp_path)
    await restore(file, target)
    assert await verify_database(target) == []
    async with await Store.open(target) as restored:
        after = await restored.lesson(ready)
        assert before is not None
        assert after is not None
        assert (after.state, after.sample is None) == (before.state, False)
        assert after.sample is not None
        assert before.sample is not None
        assert after.sample.prompt_ids.tolist() == before.sample.prompt_ids.tolist()
        assert await restored.lesson_counts() == await store.lesson_counts()
        assert await restored.hints() == hints
        sources = [await one.hint_sources(hints[0].hint_id) for one in (store, restored)]
        assert sources[0] == sources[1] != []


async def test_an_existing_file_is_not_overwritten(store: Store, kind: str, tmp_path: Path) -> None:
    (tmp_path / "backup").write_text("precious")
    with pytest.raises(BackupError, match="not overwritten"):
        await backed_up(store.config, tmp_path)
    assert (tmp_path / "backup").read_text() == "precious"
    with pytest.raises(BackupError, match="no such folder"):
        await backed_up(store.config, tmp_path / "nowhere")


async def test_a_backup_that_changed_is_refused(
    store: Store, kind: str, target: StoreConfig, tmp_path: Path
) -> None:
    file = await backed_up(store.config, tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BackupError, match="damaged"):
        await restore(file, target)
    file.write_bytes(whole)
    description = tmp_path / "backup.json"
    values = json.loads(description.read_text())
    description.write_text(json.dumps({**values, "schema": "9999"}))
    with pytest.raises(BackupError, match="update the program"):
        await restore(file, target)
    other = {"sqlite": "postgresql", "postgresql": "sqlite"}[kind]
    description.write_text(json.dumps({**values, "kind": other}))
    with pytest.raises(BackupError, match=f"a backup of {other}"):
        await restore(file, target)
    description.unlink()
    with pytest.raises(BackupError, match="not the description"):
        await restore(file, target)


async def test_the_log_of_an_earlier_database_is_not_mixed_in(
    sqlite_config: StoreConfig, tmp_path: Path
) -> None:
    async with await Store.open(sqlite_config) as store:
        await recorded(store)
        file = await backed_up(sqlite_config, tmp_path)
    target = StoreConfig.sqlite(tmp_path / "other.db")
    (tmp_path / "other.db-wal").write_bytes(b"old")
    with pytest.raises(BackupError, match=r"other\.db-wal exists"):
        await restore(file, target)


async def test_a_server_without_its_client_programs_is_said(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config.is_sqlite:
        pytest.skip("SQLite needs no programs")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackupError, match="pg_dump is not installed"):
        await backed_up(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
