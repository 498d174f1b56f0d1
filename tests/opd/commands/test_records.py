"""`opd records` as it is called: what it prints, and its exit status."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.run import config as run_config
from records.config import StoreConfig
from records.names import TurnState
from records.spill.spill import SpillFile, waiting_files
from records.spill.spilled import Addition, encode
from records.store import Store
from tests.records.builders import SCOPE, a_session, a_turn, following, recorded, turn_in
from tests.records.training.history.test_prompts import rewarded
from trainer.checkpoints.manifest import Manifest


@pytest.fixture
def store_config(config_file: Path) -> StoreConfig:
    return run_config.load(config_file).store


def opd(config_file: Path, command: str, *arguments: object) -> Result:
    words = ["records", command, "--run", str(config_file.parent), *map(str, arguments)]
    return CliRunner().invoke(app, words)


def in_store(config: StoreConfig, work: Any) -> Any:
    """Run `work(store)` on the run's store."""

    async def run() -> Any:
        async with await Store.open(config) as store:
            return await work(store)

    return asyncio.run(run())


async def a_trained_session(store: Store) -> str:
    """A session of the user ann with a trained turn; another turn is trained on top."""
    session_id = await a_session(store)
    await turn_in(store, TurnState.TRAINED, session_id=session_id, user_id="ann")
    await turn_in(store, TurnState.TRAINED, user_id="bob")
    return session_id


def test_forgetting_says_what_was_trained_and_what_may_still_hold_it(
    config_file: Path, store_config: StoreConfig, tmp_path: Path
) -> None:
    session_id = in_store(store_config, a_trained_session)
    assert opd(config_file, "backup", tmp_path / "old.db").exit_code == 0
    (tmp_path / "report.html").write_text("shows turns")
    result = opd(config_file, "forget", "--user", "ann")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("deleted: 1 sessions, 1 turns")
    assert f"session {session_id}" in lines
    assert "policy versions trained on it: 1" in lines
    assert "versions that descend from them: 2" in lines
    assert any(f"may still contain it: backup {tmp_path}/old.db" in line for line in lines)
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "report.html").write_text("shows turns")
    for arguments in (
        ("forget", "--user", "ann"),
        ("forget", "--session", session_id),
        ("lineage", session_id),
    ):
        again = opd(config_file, *arguments)
        assert again.exit_code == 0, again.output
        first, *others = again.output.splitlines()
        assert first.startswith(f"session {session_id}: deleted on request at ")
        assert others == [
            "policy versions trained on it: 1",
            "versions that descend from them: 2",
        ]
    assert (tmp_path / "report.html").exists(), "nothing was changed"


def test_lineage_of_what_is_stored_of_what_taught_nothing_and_of_what_never_was(
    config_file: Path, store_config: StoreConfig
) -> None:
    trained = in_store(store_config, a_trained_session)
    untrained = in_store(
        store_config, lambda store: store.ensure_session(scope=SCOPE, external_id="chat 7")
    )
    assert opd(config_file, "lineage", trained).output.splitlines() == [
        f"session {trained}: stored",
        "policy versions trained on it: 1",
        "versions that descend from them: 2",
    ]
    stored = [f"session {untrained}: stored", "no policy version was trained on it"]
    assert opd(config_file, "lineage", "chat 7").output.splitlines() == stored
    assert opd(config_file, "forget", "--session", "chat 7").exit_code == 0
    again = opd(config_file, "lineage", "chat 7")
    assert again.output.splitlines()[1:] == ["no policy version was trained on it"]
    wrong = opd(config_file, "lineage", trained[:-1])
    assert wrong.exit_code == 2
    [line] = wrong.output.strip().splitlines()
    assert line.endswith(f"is or was stored; did you mean {trained!r}?")


def test_forgetting_says_how_many_answers_pass_rates_no_longer_count(
    config_file: Path, store_config: StoreConfig
) -> None:
    async def answered(store: Store) -> str:
        turn = await store.turn(await rewarded(store, 1.0))
        assert turn is not None
        return turn.session_id

    session_id = in_store(store_config, answered)
    lines = opd(config_file, "forget", "--session", session_id).output.splitlines()
    assert "pass rates of prompts no longer count 1 rewarded answers" in lines


def test_what_an_earlier_program_deleted_has_an_unknown_lineage(
    config_file: Path, store_config: StoreConfig
) -> None:
    row = text("INSERT INTO deletions (session_id, deleted_at, reason) VALUES ('s', 1, 'forget')")
    in_store(store_config, lambda store: store.writer.run(lambda c: c.execute(row)))
    result = opd(config_file, "lineage", "s")
    assert result.exit_code == 0
    assert result.output.splitlines()[1:] == [
        "which versions were trained on s is not known: an older program deleted it"
    ]


def test_forgetting_finds_what_is_still_spilled(
    config_file: Path, store_config: StoreConfig
) -> None:
    async def work(store: Store) -> tuple[str, list[Addition]]:
        session_id = await a_session(store)
        first = a_turn(session_id)
        await store.record_turn(first, scope=SCOPE)
        # Not linked yet: only its messages tell whose it is.
        second = following(first, session_id="new", parent_turn_id=None)
        other = a_turn("other", messages=[{"role": "user", "content": "Another."}])
        return session_id, [
            Addition(scope=SCOPE, created_at=1.0, turn=second, is_deferred=True),
            Addition(scope=SCOPE, created_at=2.0, turn=other, is_deferred=True),
        ]

    session_id, additions = in_store(store_config, work)
    file = SpillFile.create(store_config.spill_path, 0)
    for addition in additions:
        file.append(addition.created_at, encode(addition))
    file.close()
    result = opd(config_file, "forget", "--session", session_id)
    assert result.exit_code == 0, result.output
    assert "deleted: 1 spilled requests" in result.output
    [waiting] = waiting_files(store_config.spill_path)
    left = SpillFile.orphan(waiting)
    assert left is not None
    assert [record.payload for record in left.read()] == [encode(additions[1])]
    left.close()


def test_a_typing_error_in_what_to_forget_names_the_nearest_and_changes_nothing(
    config_file: Path, store_config: StoreConfig, tmp_path: Path
) -> None:
    session_id = in_store(store_config, a_trained_session)
    (tmp_path / "report.html").write_text("shows turns")
    for option, given, meant in (
        ("--session", session_id[:-1], session_id),
        ("--user", "an", "ann"),
    ):
        result = opd(config_file, "forget", option, given)
        assert result.exit_code == 2
        [line] = result.output.strip().splitlines()
        assert line.endswith(f"nothing was changed; did you mean {meant!r}?")
    assert (tmp_path / "report.html").exists()
    assert opd(config_file, "forget", "--session", session_id).exit_code == 0


def test_forgetting_needs_to_know_what(config_file: Path) -> None:
    result = opd(config_file, "forget")
    assert result.exit_code == 2
    assert "either --session or --user" in result.output


def test_a_backup_comes_back_where_nothing_is(
    config_file: Path, store_config: StoreConfig, tmp_path: Path
) -> None:
    turn_id = in_store(store_config, recorded)
    file = tmp_path / "backup.db"
    taken = opd(config_file, "backup", file)
    assert taken.exit_code == 0, taken.output
    assert "checksums and states are in order" in taken.output
    refused = opd(config_file, "restore", file)
    assert refused.exit_code == 2
    assert "nothing is overwritten" in refused.output
    assert opd(config_file, "verify", "--backup", file).exit_code == 0
    for path in tmp_path.glob("records.db*"):
        if path.is_file():
            path.unlink()
    back = opd(config_file, "restore", file)
    assert back.exit_code == 0, back.output
    assert in_store(store_config, lambda store: store.has_turn(turn_id))


def test_a_database_of_a_newer_program_is_refused_in_one_line(
    config_file: Path, store_config: StoreConfig, tmp_path: Path
) -> None:
    newer = text("UPDATE alembic_version SET version_num = '9999'")
    in_store(store_config, lambda store: store.writer.run(lambda c: c.execute(newer)))
    result = opd(config_file, "backup", tmp_path / "backup.db")
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert "written by a newer version" in line
    assert not (tmp_path / "backup.db").exists()


def test_verification_compares_store_and_manifests(
    config_file: Path, store_config: StoreConfig, tmp_path: Path
) -> None:
    turn_id = in_store(store_config, lambda store: turn_in(store, TurnState.TRAINED))
    common: dict[str, Any] = {"model": "some/model", "seed": 0, "created_at": 1.0, "files": {}}
    root = Manifest(
        version=0,
        parent_version=None,
        parent_hash=None,
        step=0,
        turn_ids=(),
        staleness=(),
        **common,
    )
    step = Manifest(
        version=1,
        parent_version=0,
        parent_hash=root.hash,
        step=1,
        turn_ids=(turn_id,),
        staleness=(0,),
        **common,
    )
    for manifest in (root, step):
        folder = tmp_path / "checkpoints" / f"step_{manifest.version:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(manifest.to_bytes())
    result = opd(config_file, "verify")
    assert result.exit_code == 1
    assert "version 1: the store has another manifest" in result.output

    known = text("UPDATE policy_versions SET manifest_hash = :hash")
    in_store(
        store_config,
        lambda store: store.writer.run(lambda c: c.execute(known, {"hash": step.hash})),
    )
    assert "manifests and store agree" in opd(config_file, "verify").output
    (tmp_path / "checkpoints/step_000001/manifest.json").write_text("{")
    assert "not a readable manifest" in opd(config_file, "verify").output
