from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter

import pytest

from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    claimed,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import verdict_of, votes_of

JUDGING, SCORING = TurnState.JUDGING, TurnState.SCORING


async def judged(store: Store, count: int) -> list[str]:
    """`count` turns that wait for the judge, oldest first."""
    turn_ids = []
    for _ in range(count):
        turn_ids.append(await recorded(store))
        assert await store.set_next_state(turn_ids[-1], [REPLY])
    return turn_ids


async def test_a_claim_gives_the_newest_turns_and_hides_them_from_others(store: Store) -> None:
    turn_ids = await judged(store, 5)
    assert await claimed(store, JUDGING, "a", limit=2) == turn_ids[:2:-1]
    assert await claimed(store, JUDGING, "b", limit=2) == turn_ids[2:0:-1]
    assert await claimed(store, JUDGING, "a", limit=2) == turn_ids[:1]
    assert await claimed(store, JUDGING, "b", limit=2) == []
    assert await claimed(store, SCORING, "b", limit=2) == []


async def test_turns_of_a_session_are_claimed_together(store: Store) -> None:
    sessions = [await a_session(store) for _ in range(3)]
    turn_ids = {}
    for index in range(9):
        turn = a_turn(sessions[index % 3])
        await store.record_turn(turn, scope=SCOPE)
        assert await store.set_next_state(turn.turn_id, [REPLY])
        turn_ids[index] = turn.turn_id
    expected = [turn_ids[index] for index in (8, 5, 2, 7)]
    assert await claimed(store, JUDGING, limit=4) == expected


async def test_an_expired_claim_is_free_and_its_owner_writes_nothing(
    store: Store, clock: Clock
) -> None:
    [turn_id] = await judged(store, 1)
    assert await claimed(store, JUDGING, "slow") == [turn_id]
    clock.now += 59
    assert await claimed(store, JUDGING, "quick") == []
    clock.now += 2
    assert await claimed(store, JUDGING, "quick") == [turn_id]
    assert not await store.commit_verdict("slow", a_verdict(turn_id, "hint of the slow one"), None)
    assert await verdict_of(store, turn_id) is None
    assert await store.commit_verdict("quick", a_verdict(turn_id), None)
    assert not await store.commit_verdict("slow", a_verdict(turn_id, "hint of the slow one"), None)
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.hint == HINT


async def test_an_expired_claim_that_nobody_took_still_counts(store: Store, clock: Clock) -> None:
    [turn_id] = await judged(store, 1)
    assert await claimed(store, JUDGING) == [turn_id]
    clock.now += 1000
    assert await store.commit_verdict(OWNER, a_verdict(turn_id), None)


async def test_extended_claims_stay_and_released_ones_are_free(store: Store, clock: Clock) -> None:
    kept, given_back = await judged(store, 2)
    assert await claimed(store, JUDGING, "a") == [given_back, kept]
    clock.now += 50
    assert await store.extend_claims("a", [kept], 60.0) == 1
    assert await store.release("a", [given_back]) == 1
    assert await claimed(store, JUDGING, "b") == [given_back]
    clock.now += 50
    assert await claimed(store, JUDGING, "c") == []
    clock.now += 11
    assert await claimed(store, JUDGING, "c") == [given_back, kept]
    assert await store.extend_claims("a", [kept], 60.0) == 0


async def test_claimed_turns_carry_what_the_workers_need(store: Store) -> None:
    turn_id = await turn_in(store, JUDGING)
    assert await store.commit_verdict(OWNER, a_verdict(turn_id), None)
    [turn] = await store.claim(SCORING, owner=OWNER, limit=1, ttl_s=1.0)
    assert (turn.hint, turn.next_state, turn.state) == (HINT, [REPLY], SCORING)
    assert await votes_of(store, turn_id) == a_verdict(turn_id).votes
    assert await store.commit_scores(OWNER, [a_score(turn_id)])
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.hinted_prompt_ids.tolist() == [1, 2, 3, 30, 31, 4]
    assert score.teacher_logprobs.tolist() == [-0.25] * 3


async def test_concurrent_claims_never_share_a_turn(store: Store, clock: Clock) -> None:
    turn_ids = await judged(store, 40)
    async with await Store.open(store.config, clock) as other:

        async def drain(which: Store, owner: str) -> list[str]:
            mine: list[str] = []
            while batch := await claimed(which, JUDGING, owner, limit=3):
                mine += batch
            return mine

        owners = [(which, f"{number}") for number in range(4) for which in (store, other)]
        taken = await asyncio.gather(*(drain(which, owner) for which, owner in owners))
    # PostgreSQL skips rows that another transaction looks at; they are free a moment later.
    taken.append(await claimed(store, JUDGING, "last", limit=40))
    assert Counter(turn for part in taken for turn in part) == Counter(turn_ids)


def _judge_all(arguments: tuple[StoreConfig, str, int]) -> list[str]:
    config, owner, total = arguments

    async def run() -> list[str]:
        mine = []
        async with await Store.open(config) as store:
            while (await store.counts())[SCORING] < total:
                for turn_id in await claimed(store, JUDGING, owner, limit=4):
                    assert await store.commit_verdict(owner, a_verdict(turn_id), None)
                    mine.append(turn_id)
        return mine

    return asyncio.run(run())


@pytest.mark.timeout(120)
async def test_processes_share_the_work_without_doing_any_twice(store: Store) -> None:
    turn_ids = await judged(store, 40)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        arguments = [(store.config, f"process-{number}", len(turn_ids)) for number in range(3)]
        done = await asyncio.to_thread(pool.map, _judge_all, arguments)
    assert Counter(turn for part in done for turn in part) == Counter(turn_ids)
    assert await state_of(store, turn_ids[0]) is SCORING
