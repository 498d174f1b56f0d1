"""`opd records export`: what the files hold."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from opd.cli.app import app
from opd.export.folder import new_folder
from records.care.housekeeping import Backup, Housekeeping
from records.feedback.feedback import Feedback
from records.names import DropReason, TurnState
from records.store import Store
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL
from tests.opd.export.conftest import ARun
from tests.records.builders import (
    ANSWER,
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    USER,
    a_session,
    a_turn,
    a_verdict,
    a_vote,
    claimed,
    following,
    turn_in,
)
from trainer.errors import StartupError

TOOLS = [{"type": "function", "function": {"name": "warmth", "parameters": {}}}]


def lines(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {**row, "turns": [json.loads(turn) for turn in row["turns"]]} if "turns" in row else row
        for row in rows
    ]


async def a_conversation(store: Store) -> tuple[str, list[str]]:
    """A session of two turns, the first judged; then a turn alone."""
    first = a_turn(await store.ensure_session(scope=SCOPE, external_id="mine"), tools=TOOLS)
    second = following(first, tools=TOOLS)
    await store.record_turn(first, scope=SCOPE)
    await store.set_next_state(first.turn_id, [REPLY])
    await store.record_turn(second, scope=SCOPE)
    await claimed(store, TurnState.JUDGING)
    votes = (a_vote(0), a_vote(1, score=None, hint="", text="", error="timeout"))
    assert await store.commit_verdict(OWNER, a_verdict(first.turn_id, HINT, votes), None)
    alone = a_turn(await a_session(store), drop_reason=DropReason.ABORTED)
    await store.record_turn(alone, scope=SCOPE)
    return first.session_id, [first.turn_id, second.turn_id, alone.turn_id]


def test_a_session_is_a_line_that_tells_each_thing_once(a_run: ARun) -> None:
    session_id, turn_ids = a_run.fill(a_conversation)
    result = a_run.export()
    assert result.exit_code == 0, result.output
    assert "3 turns of 2 sessions" in result.output
    line, other = lines(a_run.out / "sessions.jsonl")
    assert (line["format"], line["version"]) == ("hindsight-opd-export", 2)
    assert (line["session_id"], line["session_name"]) == (session_id, "mine")
    config = RendererConfig(name="default")
    wanted = renderer_fingerprint(Rendering.load(str(MODEL), config), config)
    assert line["renderer"] == wanted
    first, second = line["turns"]
    assert [first["turn_id"], second["turn_id"]] == turn_ids[:2]
    assert (first["parent_turn_id"], first["position"]) == (None, 0)
    assert (first["shared_messages"], first["messages"], first["tools"]) == (0, [USER], TOOLS)
    assert first["response"] == ANSWER
    assert first["next_state"] == [REPLY]
    assert first["votes"] == [a_vote(0).text, ""]
    assert (first["hint"], first["state"]) == (HINT, "scoring")
    assert first["prompt_ids"] == [1, 2, 3, 4]
    assert first["temperature"] == 1.0
    assert np.float32(first["rollout_logprobs"]).tolist() == np.float32([-1, -0.55, -0.1]).tolist()
    assert first["version_spans"] == [[0, 0, 3]]
    assert (second["parent_turn_id"], second["position"]) == (turn_ids[0], 1)
    assert (second["shared_messages"], second["messages"]) == (2, [REPLY])
    assert (second["shared_ids"], second["prompt_ids"]) == (7, [5, 6])
    assert "tools" not in second
    assert second["votes"] is None
    assert second["next_state"] == []
    assert [turn["drop_reason"] for turn in other["turns"]] == ["aborted"]


def test_parquet_holds_the_same_in_rows_that_stand_alone(a_run: ARun) -> None:
    session_id, turn_ids = a_run.fill(a_conversation)
    assert a_run.export("--format", "parquet").exit_code == 0
    rows = parquet.read_table(a_run.out / "sessions.parquet").to_pylist()
    assert [row["turn_id"] for row in rows] == turn_ids
    second = rows[1]
    assert (second["session_id"], second["parent_turn_id"]) == (session_id, turn_ids[0])
    assert json.loads(second["messages"]) == [USER, ANSWER, REPLY]
    assert json.loads(second["tools"]) == TOOLS
    assert second["prompt_ids"] == [1, 2, 3, 4, 7, 8, 9, 5, 6]
    assert second["rollout_logprobs"] == np.float32([-1, -0.55, -0.1]).tolist()
    assert second["version_spans"] == [[0, 0, 3]]
    assert (second["votes"], second["hint"], second["trained_version"]) == (None, None, None)
    votes = parquet.read_table(a_run.out / "votes.parquet").to_pylist()
    assert [(row["turn_id"], row["score"], row["error"]) for row in votes] == [
        (turn_ids[0], 1, None),
        (turn_ids[0], None, "timeout"),
    ]


def test_votes_hints_and_samples_name_their_turn(a_run: ARun) -> None:
    turn_id = a_run.fill(lambda store: turn_in(store, TurnState.TRAINED))
    assert a_run.export("--what", "votes,hints, samples").exit_code == 0
    assert not (a_run.out / "sessions.jsonl").exists()
    assert [row["index"] for row in lines(a_run.out / "votes.jsonl")] == [0, 1, 2]
    [hint] = lines(a_run.out / "hints.jsonl")
    assert (hint["turn_id"], hint["hint"], hint["candidates"]) == (turn_id, HINT, [HINT])
    [sample] = lines(a_run.out / "samples.jsonl")
    assert (sample["turn_id"], sample["version"], sample["teacher"]) == (turn_id, 1, "start")
    assert sample["advantages"] == [-0.5, 0.0, 0.5]
    assert sample["log_ratios"] == [-0.25, 0.0, 0.25]
    assert sample["weights"] == [0.75, 0.75, 0.75]
    assert sample["entropies"] == [0.0, 0.5, 1.0]
    assert sample["engine_gaps"] == [None, 0.125, 0.25]
    assert sample["teacher_logprobs"] == [-0.25] * 3
    about = json.loads((a_run.out / "export.json").read_text())
    assert about["rows"] == {"votes": 3, "hints": 1, "samples": 1}


def test_states_and_sessions_are_chosen(sqlite_run: ARun) -> None:
    _, turn_ids = sqlite_run.fill(a_conversation)
    result = sqlite_run.export("--session", "mine", "--state", "awaiting_next_state")
    assert result.exit_code == 0, result.output
    [line] = lines(sqlite_run.out / "sessions.jsonl")
    [turn] = line["turns"]
    # Its parent is not in the file: it stands for itself, where it stood.
    assert (turn["turn_id"], turn["position"]) == (turn_ids[1], 1)
    assert (turn["parent_turn_id"], turn["shared_messages"], turn["shared_ids"]) == (None, 0, 0)
    assert turn["messages"] == [USER, ANSWER, REPLY]
    assert turn["tools"] == TOOLS
    assert len(turn["prompt_ids"]) == 9


def test_parents_are_found_across_batches(
    sqlite_run: ARun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.export.files.TURNS_AT_A_TIME", 2)

    async def work(store: Store) -> None:
        turn = a_turn(await a_session(store))
        for number in range(5):
            await store.record_turn(turn, scope=SCOPE)
            turn = following(turn, {"role": "user", "content": str(number)})

    sqlite_run.fill(work)
    assert sqlite_run.export("--what", "sessions").exit_code == 0
    [line] = lines(sqlite_run.out / "sessions.jsonl")
    assert [turn["shared_messages"] for turn in line["turns"]] == [0, 2, 4, 6, 8]
    assert [len(turn["messages"]) for turn in line["turns"]] == [1] * 5
    assert [len(turn["prompt_ids"]) for turn in line["turns"]] == [4, 2, 2, 2, 2]


def test_feedback_stands_behind_what_followed_with_its_score(sqlite_run: ARun) -> None:
    async def work(store: Store) -> None:
        turn = a_turn(await a_session(store))
        await store.record_turn(turn, scope=SCOPE)
        await store.set_next_state(turn.turn_id, [REPLY])
        said = Feedback(text="Celsius!", score=2.0, score_range=(1.0, 5.0))
        await store.add_feedback(SCOPE, turn.turn_id, said)

    sqlite_run.fill(work)
    assert sqlite_run.export("--what", "sessions").exit_code == 0
    [line] = lines(sqlite_run.out / "sessions.jsonl")
    [turn] = line["turns"]
    content = "Rating: 2 on a scale from 1 to 5\nCelsius!"
    assert turn["next_state"] == [REPLY, {"role": "feedback", "content": content}]
    [said] = turn["feedback"]
    assert (said["content"], said["reward"]) == (content, -0.5)


def test_what_was_redacted_has_no_ids_and_no_text_of_it(sqlite_run: ARun) -> None:
    async def work(store: Store) -> None:
        asked = {"role": "user", "content": "I am ann@kestrel-freight.com, who are you?"}
        await store.record_turn(a_turn(await a_session(store), messages=[asked]), scope=SCOPE)

    sqlite_run.fill(work)
    assert sqlite_run.export().exit_code == 0
    text = (sqlite_run.out / "sessions.jsonl").read_text()
    assert "ann@" not in text
    [line] = lines(sqlite_run.out / "sessions.jsonl")
    assert line["renderer"] == ""
    assert "prompt_ids" not in line["turns"][0]
    assert line["turns"][0]["drop_reason"] == "sensitive"


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_text_that_is_no_unicode_is_written(sqlite_run: ARun, file_format: str) -> None:
    odd = {"role": "user", "content": "half \ud83d of a pair, and \x00"}
    shown = {"role": "user", "content": "half \ufffd of a pair, and \x00"}
    big = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70}}}]

    async def work(store: Store) -> None:
        turn = a_turn(await a_session(store), messages=[odd], tools=big)
        await store.record_turn(turn, scope=SCOPE)

    sqlite_run.fill(work)
    assert sqlite_run.export("--format", file_format).exit_code == 0
    if file_format == "jsonl":
        [turn] = lines(sqlite_run.out / "sessions.jsonl")[0]["turns"]
        assert (turn["messages"], turn["tools"]) == ([shown], big)
        assert turn["prompt_ids"] == [1, 2, 3, 4]
    else:
        [row] = parquet.read_table(sqlite_run.out / "sessions.parquet").to_pylist()
        assert (json.loads(row["messages"]), json.loads(row["tools"])) == ([shown], big)


def test_without_the_model_ids_are_left_out_only_if_asked(sqlite_run: ARun) -> None:
    sqlite_run.fill(a_conversation)
    sqlite_run.save(model=str(sqlite_run.folder / "moved"), url=sqlite_run.store_config.url)
    refused = sqlite_run.export()
    assert refused.exit_code == 2
    assert "--no-ids" in refused.output
    assert not sqlite_run.out.exists()
    assert sqlite_run.export("--no-ids").exit_code == 0
    [line, _] = lines(sqlite_run.out / "sessions.jsonl")
    assert line["renderer"] == ""
    assert not any("prompt_ids" in turn for turn in line["turns"])


def test_nothing_is_overwritten_and_nothing_half_is_left(sqlite_run: ARun) -> None:
    sqlite_run.fill(a_conversation)
    sqlite_run.out.mkdir()
    assert sqlite_run.export().exit_code == 0
    before = sorted(sqlite_run.folder.iterdir())
    again = sqlite_run.export()
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.output
    assert sorted(sqlite_run.folder.iterdir()) == before


def test_forgetting_leaves_it_out_and_names_the_folder_that_holds_it(sqlite_run: ARun) -> None:

    session_id, _ = sqlite_run.fill(a_conversation)
    assert sqlite_run.export().exit_code == 0
    words = ["records", "forget", "--config", str(sqlite_run.config_file), "--session", "mine"]
    result = CliRunner().invoke(app, words)
    assert f"may still contain it: export {sqlite_run.out}" in result.output
    sqlite_run.out.rename(sqlite_run.folder / "old")
    assert sqlite_run.export().exit_code == 0
    assert session_id not in (sqlite_run.out / "sessions.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--what", "sessions,all"], "--what: 'all' is not one of sessions, votes, hints, samples"),
        (["--format", "csv"], "--format: 'csv' is not one of jsonl, parquet"),
        (["--state", "done"], "--state: 'done' is not one of awaiting_next_state"),
        (["--since", "monday"], "--since: 'monday' is not a date"),
        (["--dataset", "rlhf"], "--dataset: 'rlhf' is not one of sft, taught, preference"),
        (["--dataset", "sft", "--state", "trained"], "a data set chooses its turns itself"),
    ],
)
def test_an_unknown_word_is_one_clear_line(
    sqlite_run: ARun, arguments: list[str], told: str
) -> None:
    result = sqlite_run.export(*arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_session_that_is_not_there_is_one_clear_line(sqlite_run: ARun) -> None:
    sqlite_run.fill(a_conversation)
    result = sqlite_run.export("--session", "nobody")
    assert result.exit_code == 2
    assert "no session 'nobody'" in result.output
    assert "did you mean" not in result.output
    assert not sqlite_run.out.exists()


async def _backups(store: Store) -> list[Backup]:
    return await Housekeeping(store, time.time).backups()


@pytest.mark.parametrize("more", [(), ("--dataset", "sft"), ("--dataset", "preference")])
def test_a_session_that_was_probably_meant_is_named(a_run: ARun, more: tuple[str, ...]) -> None:
    a_run.fill(a_conversation)
    result = a_run.export("--session", "minee", *more)
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1] == (
        "error: --session: the records contain no session 'minee' with such turns; "
        "did you mean 'mine'?"
    )
    assert not a_run.out.exists()
    assert a_run.fill(_backups) == []


def test_a_run_without_records_is_not_given_an_empty_database(sqlite_run: ARun) -> None:
    (sqlite_run.folder / "records.db").unlink()
    result = sqlite_run.export()
    assert result.exit_code == 2
    assert "nothing was recorded" in result.output
    assert not (sqlite_run.folder / "records.db").exists()


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(StartupError, match="out: No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(StartupError, match="cannot write to"),
        new_folder(tmp_path / "file" / "out"),
    ):
        raise AssertionError("there is no such folder")


def test_only_the_owner_may_read_an_export(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0


async def of_many_types(store: Store) -> int:
    """Sessions of plain texts that fill more than the library reads at once, then of all types."""
    for number in range(13):
        turn = a_turn(
            await a_session(store), messages=[{"role": "user", "content": "x " * 500_000}]
        )
        assert number or not turn.tools
        await store.record_turn(turn, scope=SCOPE)
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y", "n": [1, "two", None]}]
    schemas = [{"type": "string", "default": "x"}, {"type": ["integer", "null"], "default": 1}]
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"q": schema}}}}
        for schema in schemas
    ]
    for message in ({"role": "user", "content": parts}, USER):
        session_id = await store.ensure_session(scope=SCOPE, external_id=str(message["content"]))
        turn = a_turn(session_id, messages=[message], tools=tools, sampling={"temperature": 0.5})
        await store.record_turn(turn, scope=SCOPE)
    await store.close_session(session_id, "done")
    await turn_in(store, TurnState.TRAINED)
    return 16


def test_sessions_open_as_a_data_set_whatever_they_hold(sqlite_run: ARun, tmp_path: Path) -> None:
    import datasets

    number = sqlite_run.fill(of_many_types)
    assert sqlite_run.export("--what", "sessions").exit_code == 0
    file = sqlite_run.out / "sessions.jsonl"
    rows = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(rows) == number
    told = [[json.loads(turn) for turn in row["turns"]] for row in rows]
    assert told == [row["turns"] for row in lines(file)]
