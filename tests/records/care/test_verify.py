"""A whole store has no findings; each kind of damage has its own."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import text

from records.care.verify import verify_database
from records.config import StoreConfig
from records.errors import StoreUnavailable
from records.names import TurnState
from records.store import Store
from records.turns.recording import Recording, RecordingKind
from tests.records.builders import ANSWER, OWNER, a_turn, a_verdict, following, recorded, turn_in


async def in_every_state(store: Store) -> None:
    """A turn in each state; the later states first, so that none is claimed on the way."""
    for state in reversed(TurnState):
        await turn_in(store, state)


async def test_a_store_with_turns_in_every_state_is_in_order(store: Store) -> None:
    await in_every_state(store)
    first = a_turn(await store.ensure_session(scope="key", external_id=None))
    await store.record_turn(first, scope="key")
    await store.record_turn(following(first), scope="key")
    assert await verify_database(store.config) == []


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE turns SET drop_reason = NULL WHERE state = 'dropped'", "without a reason"),
        ("UPDATE turns SET drop_reason = 'stale' WHERE state = 'ready'", "but are not dropped"),
        ("UPDATE turns SET trained_version = NULL WHERE state = 'trained'", "in no version"),
        ("UPDATE turns SET trained_version = 1 WHERE state = 'ready'", "but are not trained"),
        ("UPDATE policy_versions SET abandoned = true", "in an abandoned version"),
        ("UPDATE turns SET claim_until = NULL WHERE state = 'scoring'", "without a deadline"),
        ("UPDATE turns SET claim_owner = NULL WHERE state = 'scoring'", "without an owner"),
        (
            "UPDATE turns SET claim_owner = NULL, claim_until = NULL WHERE state = 'leased'",
            "leased to nobody",
        ),
        (
            "UPDATE turns SET claim_owner = 'x', claim_until = 1 WHERE state = 'ready'",
            "in a state that has none",
        ),
        (
            "UPDATE turns SET next_state = '[]' WHERE state = 'awaiting_next_state'",
            "wait for their next state and have one",
        ),
        ("UPDATE turns SET next_state = NULL WHERE state = 'judging'", "without a next state"),
        ("UPDATE verdicts SET hint = NULL", "without a hint"),
        ("DELETE FROM scores", "without a score or a reward"),
        ("UPDATE turns SET scope = 'another'", "another scope"),
        ("UPDATE message_nodes SET body = '{}'", "messages do not match their hash"),
        ("UPDATE turn_tokens SET prompt_length = 99", "lengths of its tokens"),
        ("UPDATE turn_tokens SET response_ids = prompt_ids", "do not match their checksum"),
        ("UPDATE samples SET advantages = entropies", "1 samples do not have a number for each"),
        ("UPDATE samples SET weights = advantages", "1 samples do not have a number for each"),
        ("UPDATE samples SET log_ratios = NULL", "1 samples do not have a number for each"),
        (
            "UPDATE totals SET num_rows = num_rows + 1 WHERE name LIKE 'turn:ready:%'",
            "the total of turn:ready::0 is",
        ),
        ("UPDATE totals SET sum_second = 0", "the total of vote:1 is"),
        ("DELETE FROM totals", "the total of verdict is 0 0 0 0 0"),
    ],
)
async def test_each_contradiction_is_found(store: Store, statement: str, finding: str) -> None:
    await in_every_state(store)
    await store.writer.run(lambda connection: connection.execute(text(statement)))
    problems = await verify_database(store.config)
    assert any(finding in problem for problem in problems), problems


async def test_a_form_that_its_session_does_not_name_is_found(store: Store) -> None:
    session = await store.ensure_session(scope="key", external_id=None)
    other = {**ANSWER, "reasoning_content": "second"}
    first, second = a_turn(session), a_turn(session, response=other)
    await store.record_turn(first, scope="key")
    await store.record_turn(second, scope="key")
    assert await verify_database(store.config) == []
    await store.writer.run(
        lambda connection: connection.execute(text("DELETE FROM session_variants"))
    )
    assert await verify_database(store.config) == [
        f"1 turns have a form of a message that session_variants does not name: {second.turn_id}"
    ]


async def test_a_recorded_turn_waits_for_the_policy_with_a_reward_alone(store: Store) -> None:
    recording = Recording(kind=RecordingKind.RECORDED, source="a file", position=2)
    turn_id = await turn_in(store, TurnState.JUDGING, recording=recording)
    verdict = a_verdict(turn_id, None, reward=1.0)
    assert await store.commit_verdict(OWNER, verdict, None)
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.state is TurnState.SCORING
    assert await verify_database(store.config) == []


async def test_a_missing_row_is_found(sqlite_config: StoreConfig) -> None:
    async with await Store.open(sqlite_config) as store:
        await recorded(store)
    path = sqlite_config.sqlite_path
    assert path is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM message_nodes WHERE depth = 0")
    problems = await verify_database(sqlite_config)
    assert any("refer to a parent_id that does not exist" in problem for problem in problems)


async def test_a_damaged_page_is_found(sqlite_config: StoreConfig) -> None:
    async with await Store.open(sqlite_config) as store:
        await in_every_state(store)
    path = sqlite_config.sqlite_path
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 6000] = b"\xff" * 6000
    path.write_bytes(data)
    try:
        problems = await verify_database(sqlite_config)
    except StoreUnavailable as error:
        problems = [str(error)]
    assert problems


async def test_a_database_of_another_program_is_said(empty_config: StoreConfig) -> None:
    async with await Store.open(empty_config) as store:
        set_version = "UPDATE alembic_version SET version_num = '9999'"
        await store.writer.run(lambda connection: connection.execute(text(set_version)))
    [problem] = await verify_database(empty_config)
    assert "does not know" in problem


async def test_no_database_is_no_good_database(sqlite_config: StoreConfig) -> None:
    with pytest.raises(StoreUnavailable, match="no database"):
        await verify_database(sqlite_config)
    assert sqlite_config.sqlite_path is not None
    assert not sqlite_config.sqlite_path.exists()
