from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import text

from records.errors import StoreConflict
from records.names import DropReason, TurnState
from records.store import Store
from records.types import VersionSpan
from tests.records.builders import (
    HINT,
    OWNER,
    TRAINER,
    a_result,
    a_session,
    a_version,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock

READY, LEASED, TRAINED, DROPPED = (
    TurnState.READY,
    TurnState.LEASED,
    TurnState.TRAINED,
    TurnState.DROPPED,
)


async def ready(store: Store, count: int) -> list[str]:
    return [await turn_in(store, READY) for _ in range(count)]


async def leased(store: Store, count: int, owner: str = TRAINER, ttl_s: float = 60.0) -> list[str]:
    return [sample.turn_id for sample in await store.lease(owner=owner, count=count, ttl_s=ttl_s)]


async def test_a_lease_is_a_whole_batch_of_the_oldest_or_nothing(store: Store) -> None:
    turn_ids = await ready(store, 5)
    assert await leased(store, 6) == []
    assert await store.ready_count() == 5
    assert await leased(store, 3) == turn_ids[:3]
    assert await leased(store, 3) == []
    assert await leased(store, 2) == turn_ids[3:]
    assert await leased(store, 1) == []
    with pytest.raises(ValueError, match="at least one"):
        await leased(store, 0)


async def test_a_lease_of_whole_sessions_is_filled_up(store: Store) -> None:
    sessions = [await a_session(store) for _ in range(2)]
    turn_ids = [
        await turn_in(store, READY, session_id=sessions[place]) for place in (0, 1, 0, 1, 0)
    ]
    found = await store.lease(owner=TRAINER, count=1, ttl_s=60.0, whole_sessions=True)
    assert [sample.turn_id for sample in found] == turn_ids[::2]
    assert await store.lease(owner=TRAINER, count=3, ttl_s=60.0, whole_sessions=True) == []
    assert await store.ready_count() == 2


async def test_a_sample_holds_aligned_tokens_and_logprobs(store: Store) -> None:
    spans = (VersionSpan(version=2, start=0, end=1), VersionSpan(version=5, start=1, end=3))
    turn_id = await turn_in(
        store, READY, sampling={"temperature": 0.6}, version_spans=spans, distribution_modified="x"
    )
    [sample] = await store.lease(owner=TRAINER, count=1, ttl_s=1.0)
    turn = await store.turn(turn_id)
    assert turn is not None
    np.testing.assert_array_equal(sample.prompt_ids, turn.prompt_ids)
    np.testing.assert_array_equal(sample.response_ids, turn.response_ids)
    np.testing.assert_array_equal(sample.rollout_logprobs, turn.rollout_logprobs)
    assert sample.teacher_logprobs.tolist() == [-0.25] * 3
    assert (sample.temperature, sample.hint, sample.oldest_version) == (0.6, HINT, 2)
    assert sample.version_spans == spans
    assert sample.distribution_modified == "x"
    assert sample.created_at == turn.created_at


async def test_leases_end_by_release_or_deadline(store: Store, clock: Clock) -> None:
    turn_ids = await ready(store, 2)
    assert await leased(store, 2, "gone", ttl_s=10.0) == turn_ids
    assert await store.release_leases("someone else") == 0
    clock.now += 5
    assert await leased(store, 2) == []
    clock.now += 6
    assert await leased(store, 2) == turn_ids
    assert await store.release_leases("gone") == 0
    assert await store.release_leases(TRAINER) == 2
    assert await store.ready_count() == 2


async def test_concurrent_leases_never_share_a_turn(store: Store, clock: Clock) -> None:
    turn_ids = await ready(store, 6)
    async with await Store.open(store.config, clock) as other:
        batches = await asyncio.gather(
            *(
                leased(which, 2, f"{index}{name}")
                for index in range(3)
                for name, which in (("a", store), ("b", other))
            )
        )
    taken = [turn for batch in batches for turn in batch]
    assert len(taken) == len(set(taken))
    assert all(len(batch) in (0, 2) for batch in batches)
    assert set(taken) <= set(turn_ids)


async def test_stale_turns_expire_by_their_oldest_token(store: Store) -> None:
    fresh = await turn_in(store, READY, version_spans=(VersionSpan(version=6, start=0, end=3),))
    mixed = await turn_in(
        store,
        READY,
        version_spans=(
            VersionSpan(version=5, start=0, end=1),
            VersionSpan(version=9, start=1, end=3),
        ),
    )
    assert await store.expire_stale(oldest_allowed=6) == 1
    assert await state_of(store, mixed) is DROPPED
    assert await state_of(store, fresh) is READY
    assert await store.drops() == {DropReason.STALE: 1}


async def test_a_step_writes_version_samples_and_states_together(store: Store) -> None:
    turn_ids = await ready(store, 2)
    assert await leased(store, 2) == turn_ids
    assert await store.next_version() == 1
    assert await store.latest_version() is None
    results = [a_result(turn_id) for turn_id in turn_ids]
    await store.commit_step(version=a_version(1), results=results)
    await store.commit_step(version=a_version(1), results=results)
    assert await store.latest_version() == a_version(1)
    assert await store.next_version() == 2
    assert (await store.counts())[TRAINED] == 2
    [example, _] = await store.example_turns(5)
    assert example.sample.advantages.tolist() == pytest.approx([-0.5, 0.0, 0.5])
    assert example.sample.version == 1


NAMES = ("log_ratios", "weights", "entropies", "engine_gaps")


async def bytes_of_weights(store: Store, turn_id: str) -> int | None:
    statement = text(f"SELECT length(weights) FROM samples WHERE turn_id = '{turn_id}'")
    return await store.read(lambda connection: connection.scalar(statement))


async def test_figures_of_each_token_are_kept_and_equal_weights_once(store: Store) -> None:
    alike, unlike, silent, left_out = turn_ids = await ready(store, 4)
    assert await leased(store, 4) == turn_ids
    nan = np.nan
    weights = {
        alike: [0.75, 0.75, 0.75],
        unlike: [0.75, 1.5, 0.75],
        left_out: [nan, 0.75, 0.75],
    }
    results = []
    for turn_id in turn_ids:
        result = a_result(turn_id)
        figures = None
        if turn_id != silent:
            assert result.figures is not None
            given = np.array(weights[turn_id], dtype=np.float32)
            figures = replace(result.figures, weights=given)
        advantages = np.array([nan, 0.0, 0.5], dtype=np.float32)
        if turn_id != left_out:
            advantages = result.advantages
        results.append(replace(result, figures=figures, advantages=advantages))
    await store.commit_step(version=a_version(1), results=results)
    for result in results:
        found = await store.whole_turn(result.turn_id)
        assert found is not None
        [sample] = found[1].samples
        assert (sample.figures is None) == (result.turn_id == silent)
        if sample.figures is not None and result.figures is not None:
            for name in NAMES:
                own, given = getattr(sample.figures, name), getattr(result.figures, name)
                np.testing.assert_array_equal(own, given)
    sizes = [await bytes_of_weights(store, turn_id) for turn_id in turn_ids]
    assert sizes == [2, 6, None, 2]


async def test_a_step_that_contradicts_the_store_writes_nothing(store: Store) -> None:
    [first, second] = await ready(store, 2)
    assert await leased(store, 1) == [first]
    with pytest.raises(StoreConflict, match="only 1 of them"):
        await store.commit_step(version=a_version(1), results=[a_result(first), a_result(second)])
    assert await store.latest_version() is None
    assert await state_of(store, first) is LEASED
    await store.commit_step(version=a_version(1), results=[a_result(first)])
    with pytest.raises(StoreConflict, match="another manifest"):
        await store.commit_step(version=a_version(1, manifest_hash="other"), results=[])


async def test_a_trainer_drops_only_what_it_leased(store: Store) -> None:
    [turn_id] = await ready(store, 1)
    assert not await store.drop(TRAINER, turn_id, DropReason.BELOW_NOISE)
    assert await leased(store, 1) == [turn_id]
    assert not await store.drop(OWNER, turn_id, DropReason.BELOW_NOISE)
    assert await store.drop(TRAINER, turn_id, DropReason.BELOW_NOISE, "0.001 < 0.01")
    assert await store.drops() == {DropReason.BELOW_NOISE: 1}


async def test_extending_revives_leases_that_nobody_else_took(store: Store, clock: Clock) -> None:
    turn_ids = await ready(store, 2)
    assert await leased(store, 1, ttl_s=10.0) == turn_ids[:1]
    assert await leased(store, 1, "other", ttl_s=1000.0) == turn_ids[1:]
    clock.now += 11.0
    assert await store.extend_leases(TRAINER, 10.0) == 1
    assert await leased(store, 1) == []
    clock.now += 11.0
    assert await leased(store, 1, "thief") == turn_ids[:1]
    assert await store.extend_leases(TRAINER, 10.0) == 0


async def test_a_handed_over_step_marks_its_turns_and_keeps_no_samples(store: Store) -> None:
    turn_ids = await ready(store, 2)
    await leased(store, 2)
    for _ in range(2):
        await store.commit_handed_over(owner=TRAINER, version=a_version(1), turn_ids=turn_ids)
    assert [await state_of(store, turn_id) for turn_id in turn_ids] == [TRAINED, TRAINED]
    assert await store.latest_version() == a_version(1)
    assert await store.example_turns(5) == []
    await store.commit_handed_over(owner=TRAINER, version=a_version(2), turn_ids=[])
    assert await store.latest_version() == a_version(2)


async def test_a_handed_over_step_on_the_leases_of_another_is_refused_whole(store: Store) -> None:
    turn_ids = await ready(store, 2)
    assert await leased(store, 1) == turn_ids[:1]
    assert await leased(store, 1, "other") == turn_ids[1:]
    with pytest.raises(StoreConflict, match="only 1 of them"):
        await store.commit_handed_over(owner=TRAINER, version=a_version(1), turn_ids=turn_ids)
    assert [await state_of(store, turn_id) for turn_id in turn_ids] == [LEASED, LEASED]
    assert await store.latest_version() is None
    await store.commit_handed_over(owner=TRAINER, version=a_version(1), turn_ids=turn_ids[:1])
    with pytest.raises(StoreConflict, match="another manifest"):
        await store.commit_handed_over(
            owner="other", version=a_version(1, manifest_hash="else"), turn_ids=turn_ids[1:]
        )


async def test_the_highest_version_is_of_any_step_or_sampled_token(store: Store) -> None:
    assert await store.highest_version() == 0
    spans = (VersionSpan(version=2, start=0, end=1), VersionSpan(version=5, start=1, end=3))
    await turn_in(store, READY, version_spans=spans)
    assert await store.highest_version() == 5
    await store.commit_handed_over(owner=TRAINER, version=a_version(7), turn_ids=[])
    assert await store.highest_version() == 7
