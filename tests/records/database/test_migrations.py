"""A database of an earlier program, with rows in it, under this one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect, text

import records
from records.config import StoreConfig
from records.database import schema
from records.names import TurnState
from records.store import Store
from records.types import SideSamples
from tests.records.builders import (
    HINT,
    OWNER,
    TRAINER,
    a_score,
    a_verdict,
    claimed,
    state_of,
    turn_in,
)
from tests.records.looking import verdict_of

MIGRATIONS = Path(records.__file__).parent / "migrations"
Shape = dict[str, set[tuple[str, str, bool]]]


def move(connection: Connection, revision: str, *, down: bool = False) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    (command.downgrade if down else command.upgrade)(config, revision)


def shape(connection: Connection) -> Shape:
    """Every column as (name, type, nullable), by table."""
    inspector = inspect(connection)
    return {
        table: {
            (column["name"], str(column["type"]), bool(column["nullable"]))
            for column in inspector.get_columns(table)
        }
        for table in inspector.get_table_names()
    }


def back_to_first(connection: Connection) -> Shape:
    move(connection, "0001", down=True)
    return shape(connection)


async def of_the_first_program(config: StoreConfig) -> dict[TurnState, str]:
    """A database at revision 0001, as its program left it: a turn in each of these states."""
    async with await Store.open(config) as store:
        turns = {
            state: await turn_in(store, state)
            for state in (
                TurnState.TRAINED,
                TurnState.READY,
                TurnState.SCORING,
                TurnState.JUDGING,
                TurnState.AWAITING_NEXT_STATE,
                TurnState.DROPPED,
            )
        }
        assert await store.release(OWNER, list(turns.values())) == 2
        await store.writer.run(back_to_first)
    return turns


async def test_what_an_earlier_program_left_goes_on(empty_config: StoreConfig) -> None:
    turns = await of_the_first_program(empty_config)
    async with await Store.open(empty_config) as store:
        assert await store.writer.run(schema.current_revision) == schema.HEAD
        for state, turn_id in turns.items():
            assert await state_of(store, turn_id) is state
        [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
        assert (sample.turn_id, sample.hint, sample.reward) == (turns[TurnState.READY], HINT, None)
        [teaching] = sample.teachings
        assert (teaching.candidate, teaching.hint, teaching.topk_ids) == (0, HINT, None)
        np.testing.assert_array_equal(teaching.teacher_logprobs, sample.teacher_logprobs)
        assert (sample.routed_experts, sample.side_samples) == (None, None)
        verdict = await verdict_of(store, turns[TurnState.READY])
        assert verdict == a_verdict(turns[TurnState.READY])
        [example] = await store.example_turns(5)
        assert example.sample.figures is None

        [waiting] = await store.claim(TurnState.SCORING, owner=OWNER, limit=9, ttl_s=60.0)
        assert (waiting.turn_id, waiting.candidates) == (turns[TurnState.SCORING], (HINT,))
        assert (waiting.teacher_key, waiting.data_source) == (None, None)
        assert await store.commit_scores(OWNER, [a_score(waiting.turn_id)])
        assert await claimed(store, TurnState.JUDGING) == [turns[TurnState.JUDGING]]
        rewarded = a_verdict(turns[TurnState.JUDGING], None, reward=-1.0)
        assert await store.commit_verdict(OWNER, rewarded, None)
        ones = np.ones((3, 2), dtype=np.float32)
        drawn = SideSamples(
            ids=ones.astype(np.int32),
            rollout_logprobs=-ones,
            teacher_logprobs=-ones,
            policy_version=1,
        )
        await store.save_side_samples(turns[TurnState.TRAINED], drawn)
        assert len(await store.lease(owner=TRAINER, count=2, ttl_s=60.0)) == 2


async def test_going_back_gives_the_first_schema_again(empty_config: StoreConfig) -> None:
    def built_anew(connection: Connection) -> Shape:
        move(connection, "base", down=True)
        move(connection, "0001")
        return shape(connection)

    async with await Store.open(empty_config) as store:
        after = await store.writer.run(back_to_first)
        assert await store.writer.run(built_anew) == after


async def test_a_process_of_the_earlier_program_can_go_on_writing(
    empty_config: StoreConfig,
) -> None:
    """While a run's processes are restarted one by one, some still write the old columns."""
    turns = await of_the_first_program(empty_config)
    turn_id = turns[TurnState.SCORING]
    columns = "turn_id, hint_hash, teacher, teacher_version, hint, prefix_length, suffix_length"
    columns += ", middle_ids, teacher_logprobs, latency_s, created_at"
    old_score = text(
        f"INSERT INTO scores ({columns}) SELECT '{turn_id}', {columns.partition(', ')[2]} "
        f"FROM scores WHERE turn_id = '{turns[TurnState.READY]}'"
    )
    old_move = text(f"UPDATE turns SET state = 'ready' WHERE turn_id = '{turn_id}'")
    async with await Store.open(empty_config) as store:
        await store.writer.run(lambda connection: connection.execute(old_score))
        await store.writer.run(lambda connection: connection.execute(old_move))
        samples = await store.lease(owner=TRAINER, count=2, ttl_s=60.0)
        assert {one.turn_id for one in samples} == {turn_id, turns[TurnState.READY]}
        assert all(len(one.teachings) == 1 for one in samples)
