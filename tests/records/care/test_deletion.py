"""Deleting a session: all of it goes, and nothing that another session needs."""

from __future__ import annotations

import numpy as np
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from records.care.deletion import Deleted
from records.care.housekeeping import Backup, Housekeeping
from records.care.rows import DeletionRow
from records.config import StoreConfig
from records.database.schema import HEAD
from records.names import TurnState
from records.store import Store
from records.tables.models import Base, NodeRow
from records.types import CapturedTurn, SideSamples
from tests.records.builders import (
    ANSWER,
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    USER,
    a_score,
    a_session,
    a_turn,
    advance,
    claimed,
    following,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.database.test_migrations import move


async def sizes(store: Store) -> dict[str, int]:
    """Rows of each table, those without rows left out."""

    def count(connection) -> dict[str, int]:
        return {
            name: connection.scalar(select(func.count()).select_from(table))
            for name, table in Base.metadata.tables.items()
        }

    found = await store.read(count)
    return {name: number for name, number in found.items() if number}


async def forget(keeper: Housekeeping, *session_ids: str) -> Deleted:
    return await keeper.delete(session_ids, "forget", patience_s=0.0)


async def session_of(store: Store, turn_id: str) -> str:
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.session_id


async def kept(store: Store, turn: CapturedTurn) -> None:
    """The turn is what it was, tokens and messages."""
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert stored.messages == turn.messages
    assert stored.response == turn.response
    np.testing.assert_array_equal(stored.prompt_ids, turn.prompt_ids)
    np.testing.assert_array_equal(stored.response_ids, turn.response_ids)


async def test_all_that_was_made_of_a_session_goes(store: Store, keeper: Housekeeping) -> None:
    turn_id = await turn_in(store, TurnState.TRAINED, tools=[{"type": "function"}])
    ones = np.ones((3, 2), dtype=np.float32)
    drawn = SideSamples(
        ids=ones.astype(np.int32), rollout_logprobs=-ones, teacher_logprobs=-ones, policy_version=1
    )
    await store.save_side_samples(turn_id, drawn)
    gone = await forget(keeper, await session_of(store, turn_id))
    assert (gone.num_sessions, gone.num_turns, gone.num_messages) == (1, 1, 2)
    assert gone.versions == (1,)
    left = await sizes(store)
    left.pop("totals")  # numbers that are 0 again: tests/records/tables/test_totals.py
    assert left == {"policy_versions": 1, "deletions": 1}


@pytest.mark.parametrize("state", [s for s in TurnState if s is not TurnState.LEASED])
async def test_a_turn_in_any_state_goes(
    store: Store, keeper: Housekeeping, state: TurnState
) -> None:
    turn_id = await turn_in(store, state)
    assert (await forget(keeper, await session_of(store, turn_id))).num_turns == 1
    assert not await store.has_turn(turn_id)


async def test_workers_that_held_a_deleted_turn_go_on(store: Store, keeper: Housekeeping) -> None:
    turn_id = await turn_in(store, TurnState.SCORING)
    await forget(keeper, await session_of(store, turn_id))
    assert not await store.commit_scores(OWNER, [a_score(turn_id)])
    assert await claimed(store, TurnState.SCORING) == []


async def test_what_is_being_trained_on_is_deleted_after_the_step(
    store: Store, keeper: Housekeeping
) -> None:
    turn_id = await turn_in(store, TurnState.LEASED)
    session_id = await session_of(store, turn_id)
    waiting = a_turn(session_id)
    await store.record_turn(waiting, scope=SCOPE)
    gone = await forget(keeper, session_id)
    assert (gone.num_turns, gone.leased_by) == (0, (TRAINER,))
    assert await state_of(store, waiting.turn_id) is TurnState.DROPPED
    await advance(store, turn_id, TurnState.LEASED)
    gone = await forget(keeper, session_id)
    assert (gone.num_turns, gone.versions) == (2, (1,))


async def test_the_messages_that_another_session_shares_stay(
    store: Store, keeper: Housekeeping
) -> None:
    system = {"role": "system", "content": "Be brief."}
    first = a_turn(await a_session(store), messages=[system, USER])
    second = a_turn(
        await a_session(store), messages=[system, {"role": "user", "content": "Hello."}]
    )
    for turn in (first, second):
        await store.record_turn(turn, scope=SCOPE)
    gone = await forget(keeper, first.session_id)
    assert gone.num_messages == 2
    await kept(store, second)


async def test_a_session_that_continues_another_keeps_its_own_tokens(
    store: Store, keeper: Housekeeping
) -> None:
    first = a_turn(await a_session(store))
    second = following(first, session_id=await a_session(store))
    third = following(second)
    for turn in (first, second, third):
        await store.record_turn(turn, scope=SCOPE)
    gone = await forget(keeper, first.session_id)
    assert (gone.num_turns, gone.num_messages) == (1, 0)
    await kept(store, second)
    await kept(store, third)
    stored = await store.turn(second.turn_id)
    assert stored is not None
    assert stored.parent_turn_id is None


async def test_feedback_that_came_with_a_deleted_turn_goes_too(
    store: Store, keeper: Housekeeping
) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    second = following(first, session_id=await a_session(store))
    await store.set_next_state(first.turn_id, [REPLY])
    await advance(store, first.turn_id, TurnState.JUDGING)
    await store.record_turn(second, scope=SCOPE)
    await forget(keeper, second.session_id)
    await kept(store, first)
    stored = await store.turn(first.turn_id)
    assert stored is not None
    assert (stored.state, stored.next_state, stored.hint) == (TurnState.DROPPED, [], None)
    assert not {"votes", "verdicts"} & set(await sizes(store))


async def test_feedback_from_elsewhere_stays(store: Store, keeper: Housekeeping) -> None:
    first = a_turn(await a_session(store))
    await store.record_turn(first, scope=SCOPE)
    await store.set_next_state(first.turn_id, [REPLY])
    other = following(
        first, {"role": "user", "content": "Other."}, session_id=await a_session(store)
    )
    await store.record_turn(other, scope=SCOPE)
    await forget(keeper, other.session_id)
    stored = await store.turn(first.turn_id)
    assert stored is not None
    assert stored.next_state == [REPLY]


async def test_a_shared_message_loses_the_form_that_only_the_deleted_turn_had(
    store: Store, keeper: Housekeeping
) -> None:
    private = {**ANSWER, "reasoning_content": "the user is Ann"}
    first = a_turn(await a_session(store), response=private)
    second = a_turn(await a_session(store))
    for turn in (first, second):
        await store.record_turn(turn, scope=SCOPE)
    await forget(keeper, first.session_id)
    await kept(store, second)
    bodies = await store.read(lambda c: list(c.scalars(select(NodeRow.body))))
    assert bodies == [USER, ANSWER] or bodies == [ANSWER, USER]


async def test_a_shared_message_keeps_the_form_that_another_turn_has(
    store: Store, keeper: Housekeeping
) -> None:
    first = a_turn(await a_session(store))
    second = a_turn(await a_session(store), response={**ANSWER, "reasoning_content": "second"})
    third = a_turn(await a_session(store))
    for turn in (first, second, third):
        await store.record_turn(turn, scope=SCOPE)
    await forget(keeper, first.session_id)
    await kept(store, second)
    await kept(store, third)
    await forget(keeper, second.session_id)
    await kept(store, third)
    assert "message_variants" not in await sizes(store)


async def test_nothing_more_is_written_of_a_deleted_session(
    store: Store, keeper: Housekeeping
) -> None:
    session_id = await a_session(store)
    await forget(keeper, session_id)
    with pytest.raises(ValueError, match="no session"):
        await store.record_turn(a_turn(session_id), scope=SCOPE)
    with pytest.raises(ValueError, match="was deleted"):
        await store.ensure_session(scope=SCOPE, external_id=None, session_id=session_id)


async def test_sessions_are_found_by_name_and_user(store: Store, keeper: Housekeeping) -> None:
    named = await store.ensure_session(scope=SCOPE, external_id="chat 7")
    of_ann = await session_of(store, await recorded(store, user_id="ann"))
    await recorded(store, user_id="bob")
    assert await keeper.find_sessions(session="chat 7") == [named]
    assert await keeper.find_sessions(session=named) == [named]
    assert await keeper.find_sessions(user="ann") == [of_ann]
    assert await keeper.find_sessions(user="nobody") == []


async def test_sessions_expire_by_age(store: Store, keeper: Housekeeping, clock: Clock) -> None:
    held = await turn_in(store, TurnState.LEASED)
    old = await session_of(store, await turn_in(store, TurnState.READY))
    clock.now += 3 * 86_400.0
    young = await recorded(store)
    gone = await keeper.expire(max_age_days=2.0)
    assert (gone.num_sessions, gone.num_turns) == (1, 1)
    assert await store.has_turn(young)
    assert await store.has_turn(held)
    reasons = await store.read(
        lambda c: c.execute(select(DeletionRow.session_id, DeletionRow.reason)).all()
    )
    assert [tuple(row) for row in reasons] == [(old, "retention")]


async def test_versions_that_descend_from_one(store: Store, keeper: Housekeeping) -> None:
    for _ in range(3):
        await turn_in(store, TurnState.TRAINED)
    assert await keeper.versions_built_on([2]) == [2, 3]
    assert await keeper.versions_built_on([]) == []


async def test_backups_are_remembered(keeper: Housekeeping) -> None:
    one = Backup(backup_id="a", location="/backups/a.db", created_at=1.0)
    await keeper.note_backup(one)
    assert await keeper.backups() == [one]
    await keeper.forget_backup("a")
    assert await keeper.backups() == []


async def test_deleted_text_is_in_no_file_of_a_sqlite_store(
    sqlite_config: StoreConfig, clock: Clock
) -> None:
    secret = "an unmistakable sentence"
    async with await Store.open(sqlite_config, clock) as store:
        turn_id = await recorded(store, messages=[{"role": "user", "content": secret * 300}])
        await recorded(store, messages=[{"role": "user", "content": "another"}])
        await forget(Housekeeping(store, clock), await session_of(store, turn_id))
        path = sqlite_config.sqlite_path
        assert path is not None
        for file in path.parent.iterdir():
            assert secret.encode() not in file.read_bytes(), file.name
        check = text("PRAGMA integrity_check")
        assert await store.read(lambda c: c.scalar(check)) == "ok"


@pytest.mark.parametrize("config", ["postgresql"], indirect=True)
async def test_a_deleted_name_is_in_no_index_of_a_server(
    store: Store, keeper: Housekeeping
) -> None:
    def others(connection) -> None:
        # Of many rows, a server leaves a few deleted ones in its indexes, unless told not to.
        connection.execute(
            text(
                "INSERT INTO sessions(session_id, scope, external_id, created_at, last_seen) "
                "SELECT i::text, 'others', 'other ' || i, i, i FROM generate_series(1, 20000) i"
            )
        )
        connection.execute(text("CREATE EXTENSION IF NOT EXISTS pageinspect"))

    def entries(connection) -> int:
        """Entries for a session's name in the index of names."""
        pages = connection.scalar(text(f"SELECT pg_relation_size('{index}') / 8192"))
        each = text(f"SELECT count(*) FROM bt_page_items('{index}', :page) WHERE data LIKE :name")
        name = f"%{' '.join(f'{one:02x}' for one in b'a private name')}%"
        return sum(
            connection.scalar(each, {"page": page, "name": name}) for page in range(1, pages)
        )

    index = "ix_sessions_external_id"
    try:
        await store.writer.run(others)
    except DBAPIError as error:
        pytest.skip(f"no pageinspect on this server: {error.orig}")
    await store.vacuum()
    gone = await store.ensure_session(scope=SCOPE, external_id="a private name")
    assert await store.read(entries) == 1
    await forget(keeper, gone)
    assert await store.read(entries) == 0


async def test_forms_that_an_earlier_program_stored_go_with_their_sessions(
    store: Store, keeper: Housekeeping
) -> None:
    first = a_turn(await a_session(store))
    second = a_turn(await a_session(store), response={**ANSWER, "reasoning_content": "second"})
    third = a_turn(await a_session(store), response={**ANSWER, "reasoning_content": "second"})
    await store.writer.run(lambda connection: move(connection, "0031", down=True))
    for turn in (first, second, third):
        await store.record_turn(turn, scope=SCOPE)
    await store.writer.run(lambda connection: move(connection, HEAD))
    await forget(keeper, second.session_id)
    await kept(store, third)
    await forget(keeper, third.session_id)
    await kept(store, first)
    assert not {"message_variants", "session_variants"} & (await sizes(store)).keys()
