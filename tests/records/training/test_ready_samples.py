"""What a lease gives beside a turn's tokens, and that a restart at any point keeps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, func, select, update

from records.config import StoreConfig
from records.errors import UnknownTurn
from records.names import DropReason, TurnState
from records.queue.claims import ScoredTurn, score_op
from records.queue.scores import score_rows
from records.store import Store
from records.tables.models import ExpertsRow, TurnRow
from records.types import UNSCORED, ReadySample, Score, SideSamples, VersionSpan
from tests.records.builders import (
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    USER,
    a_result,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    a_version,
    claimed,
    following,
    recorded,
    state_of,
    turn_in,
)
from tests.records.conftest import Clock
from tests.records.looking import verdict_of

JUDGING, SCORING, READY = TurnState.JUDGING, TurnState.SCORING, TurnState.READY
HINTS = ("the shortest hint", "a hint that is longer", "the longest hint of all three")


def scores_of(turn_id: str, **changes: Any) -> list[Score]:
    """A score for each of HINTS, with top-2 tokens."""
    return [
        a_score(
            turn_id,
            hint=hint,
            candidate=candidate,
            hinted_prompt_ids=np.array([1, 2, 3, *[30] * (candidate + 1), 4], dtype=np.int32),
            teacher_logprobs=np.full(3, -0.25 - candidate, dtype=np.float32),
            topk_ids=np.arange(6, dtype=np.int32).reshape(3, 2) + candidate,
            topk_logprobs=np.linspace(-2, -1, 6, dtype=np.float32).reshape(3, 2),
            **changes,
        )
        for candidate, hint in enumerate(HINTS)
    ]


async def judged(store: Store, **changes: Any) -> str:
    """A turn that waits for the judge, claimed by OWNER."""
    return await turn_in(store, JUDGING, **changes)


async def scored(store: Store, **changes: Any) -> str:
    """A ready turn with three candidates."""
    turn_id = await judged(store, **changes)
    verdict = a_verdict(turn_id, HINTS[0], candidates=HINTS)
    assert await store.commit_verdict(OWNER, verdict, None)
    assert await claimed(store, SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, scores_of(turn_id))
    return turn_id


async def leased(store: Store, count: int = 1) -> list[ReadySample]:
    return await store.lease(owner=TRAINER, count=count, ttl_s=60.0)


def side_samples(length: int = 3, seed: int = 0, version: int = 4) -> SideSamples:
    generator = np.random.default_rng(seed)
    return SideSamples(
        ids=generator.integers(0, 99, (length, 5)).astype(np.int32),
        rollout_logprobs=-generator.random((length, 5)).astype(np.float32),
        teacher_logprobs=-generator.random((length, 5)).astype(np.float32),
        policy_version=version,
    )


def assert_same_samples(left: SideSamples | None, right: SideSamples) -> None:
    assert left is not None
    for name in ("ids", "rollout_logprobs", "teacher_logprobs"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        assert getattr(left, name).dtype == getattr(right, name).dtype
    assert left.policy_version == right.policy_version


async def test_every_candidate_comes_back_the_selected_one_first(store: Store) -> None:
    turn_id = await scored(store)
    [sample] = await leased(store)
    assert (sample.hint, sample.reward) == (HINTS[0], None)
    assert sample.teacher_logprobs.tolist() == [-0.25] * 3
    assert [one.hint for one in sample.teachings] == list(HINTS)
    for one, expected in zip(sample.teachings, scores_of(turn_id), strict=True):
        assert (one.candidate, one.teacher, one.teacher_version) == (
            expected.candidate,
            "start",
            "0",
        )
        for name in ("hinted_prompt_ids", "teacher_logprobs", "topk_ids", "topk_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(expected, name))
            assert getattr(one, name).dtype == getattr(expected, name).dtype
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.hint == HINTS[0]
    verdict = await verdict_of(store, turn_id)
    assert verdict is not None
    assert verdict.candidates == HINTS


async def test_one_candidate_alone_is_a_teaching_too(store: Store) -> None:
    await turn_in(store, READY)
    [sample] = await leased(store)
    [teaching] = sample.teachings
    assert teaching.hinted_prompt_ids.tolist() == [1, 2, 3, 30, 31, 4]
    assert teaching.topk_ids is None
    np.testing.assert_array_equal(teaching.teacher_logprobs, sample.teacher_logprobs)


async def test_only_the_newest_commit_of_scores_counts(store: Store) -> None:
    turn_id = await scored(store)
    later = [a_score(turn_id, hint=HINTS[1], candidate=1, teacher="another")]
    prompt_ids, response_ids = await store.turn_tokens(turn_id)
    now = 2_000_000.0
    rows = score_rows(later, prompt_ids, response_ids, now)

    def score_again(connection: Connection) -> None:
        connection.execute(update(TurnRow).values(state=SCORING, claim_owner=OWNER))
        [done] = score_op(
            connection, [ScoredTurn(owner=OWNER, turn_id=turn_id, rows=rows, now=now)]
        )
        assert done

    await store.writer.run(score_again)
    [sample] = await leased(store)
    assert [(one.candidate, one.teacher) for one in sample.teachings] == [(1, "another")]
    assert sample.hint == HINTS[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores: [], "at least one candidate"),
        (lambda scores: [scores[0], scores[0]], "two scores of one candidate"),
        (lambda scores: [*scores[:2], a_score(scores[0].turn_id, hint=HINTS[1])], "two scores"),
        (
            lambda scores: [scores[0], a_score(scores[0].turn_id, candidate=1, teacher="x")],
            "several turns or teachers",
        ),
        (
            lambda scores: [
                a_score(
                    scores[0].turn_id,
                    topk_ids=np.zeros((3, 1), dtype=np.int32),
                    topk_logprobs=np.full((3, 1), np.nan, dtype=np.float32),
                )
            ],
            "top-k log-prob is not finite",
        ),
        (
            lambda scores: [
                a_score(
                    scores[0].turn_id,
                    2,
                    teacher_version=UNSCORED,
                    teacher_logprobs=np.full(2, np.nan, dtype=np.float32),
                )
            ],
            "2 teacher log-probs for 3",
        ),
    ],
)
async def test_scores_that_do_not_belong_together_are_refused(
    store: Store, change: Any, message: str
) -> None:
    turn_id = await turn_in(store, SCORING)
    with pytest.raises(ValueError, match=message):
        await store.commit_scores(OWNER, change(scores_of(turn_id)))
    assert await state_of(store, turn_id) is SCORING


async def test_prompts_that_no_engine_scored_are_ready_without_log_probs(store: Store) -> None:
    turn_id = await turn_in(store, SCORING)
    unscored = np.full(3, np.nan, dtype=np.float32)
    score = a_score(turn_id, teacher_version=UNSCORED, teacher_logprobs=unscored)
    assert await store.commit_scores(OWNER, [score])
    [sample] = await leased(store)
    assert np.isnan(sample.teacher_logprobs).all()
    [teaching] = sample.teachings
    assert teaching.teacher_logprobs is None
    assert teaching.hinted_prompt_ids.tolist() == [1, 2, 3, 30, 31, 4]
    assert await store.mean_score_latency() is None


@pytest.mark.parametrize("reward", [-1.0, 0.0, 1 / 3])
async def test_a_reward_without_a_hint_goes_straight_to_ready(store: Store, reward: float) -> None:
    turn_id = await judged(store)
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, None, reward=reward), None)
    assert await state_of(store, turn_id) is READY
    assert await claimed(store, SCORING) == []
    [sample] = await leased(store)
    assert (sample.reward, sample.hint, sample.teachings) == (reward, "", ())
    assert np.isnan(sample.teacher_logprobs).all()
    assert sample.teacher_logprobs.shape == sample.response_ids.shape


async def test_a_reward_and_a_hint_stay_together(store: Store) -> None:
    turn_id = await judged(store)
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, reward=1.0), None)
    assert await claimed(store, SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id)])
    [sample] = await leased(store)
    assert (sample.reward, len(sample.teachings)) == (1.0, 1)


async def test_a_rewarded_turn_lives_on_through_training_and_loss(store: Store) -> None:
    turn_id = await judged(store)
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, None, reward=1.0), None)
    hinted = await scored(store)
    assert {one.turn_id for one in await leased(store, 2)} == {turn_id, hinted}
    results = [a_result(turn_id), a_result(hinted)]
    await store.commit_step(version=a_version(1), results=results)
    assert [one.turn.turn_id for one in await store.example_turns(5)] == [hinted]
    await store.reconcile([])
    samples = {one.turn_id: one for one in await leased(store, 2)}
    assert samples[turn_id].reward == 1.0
    assert len(samples[hinted].teachings) == 3


async def test_after_tool_says_what_the_response_followed(store: Store) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asking = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "20 degrees"}
    after_tool = await turn_in(store, READY, messages=[USER, asking, result])
    after_user = await turn_in(store, READY, messages=[USER, asking, result, REPLY])
    samples = {one.turn_id: one.after_tool for one in await leased(store, 2)}
    assert samples == {after_tool: True, after_user: False}


async def test_routed_experts_come_back_whole(store: Store) -> None:
    session_id = await a_session(store)
    experts = np.arange(6 * 2 * 3, dtype=np.int16).reshape(6, 2, 3)
    first = a_turn(session_id, routed_experts=experts)
    more = np.full((11, 2, 3), 70_000, dtype=np.int32)
    second = following(first, routed_experts=more)
    for turn in (first, second, first):
        await store.record_turn(turn, scope=SCOPE)
    for turn in (first, second):
        assert await store.set_next_state(turn.turn_id, [REPLY])
    for turn_id in await claimed(store, JUDGING):
        assert await store.commit_verdict(OWNER, a_verdict(turn_id, None, reward=1.0), None)
    found = {one.turn_id: one.routed_experts for one in await leased(store, 2)}
    for turn_id, expected in ((first.turn_id, experts), (second.turn_id, more)):
        got = found[turn_id]
        assert got is not None
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


async def test_a_dropped_turn_keeps_no_experts(store: Store) -> None:
    experts = np.zeros((6, 1, 1), dtype=np.int16)
    await recorded(store, routed_experts=experts, drop_reason=DropReason.SIDE_TURN)

    def count(connection: Connection) -> int | None:
        return connection.scalar(select(func.count()).select_from(ExpertsRow))

    assert await store.read(count) == 0


async def test_the_key_of_a_teacher_reaches_the_worker(store: Store) -> None:
    turn_id = await recorded(store, teacher_key="math")
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.teacher_key == "math"
    other = await store.turn(await recorded(store))
    assert other is not None
    assert other.teacher_key is None


@pytest.mark.parametrize("state", list(TurnState))
async def test_side_samples_are_kept_in_any_state_and_the_last_ones_count(
    store: Store, state: TurnState
) -> None:
    turn_id = await turn_in(store, state)
    await store.save_side_samples(turn_id, side_samples(seed=1))
    await store.save_side_samples(turn_id, side_samples(seed=2, version=9))
    assert await state_of(store, turn_id) is state
    if state is READY:
        [sample] = await leased(store)
        assert_same_samples(sample.side_samples, side_samples(seed=2, version=9))


async def test_side_samples_that_have_no_place_are_refused(store: Store) -> None:
    turn_id = await turn_in(store, READY)
    with pytest.raises(ValueError, match="at 2 positions of 3"):
        await store.save_side_samples(turn_id, side_samples(2))
    with pytest.raises(UnknownTurn):
        await store.save_side_samples("nobody", side_samples())
    [sample] = await leased(store)
    assert sample.side_samples is None


async def test_side_samples_are_committed_with_the_scores_of_their_hint(store: Store) -> None:
    turn_id = await turn_in(store, SCORING)
    await store.save_side_samples(turn_id, side_samples(seed=1))
    with pytest.raises(ValueError, match="at 2 positions of 3"):
        await store.commit_scores(OWNER, scores_of(turn_id), side_samples=side_samples(2))
    given = side_samples(seed=2, version=9)
    assert not await store.commit_scores("nobody", scores_of(turn_id), side_samples=given)
    assert await store.commit_scores(OWNER, scores_of(turn_id), side_samples=given)
    [sample] = await leased(store)
    assert_same_samples(sample.side_samples, given)


async def test_hints_with_odd_characters_stay_the_selected_ones(store: Store) -> None:
    hints = ("use \x00 celsius \ud800", "use celsius, always")
    turn_id = await judged(store)
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, hints[0], candidates=hints), None)
    verdict = await verdict_of(store, turn_id)
    assert verdict is not None
    assert verdict.candidates == ("use \ufffd celsius \ufffd", hints[1])
    [turn] = await store.claim(SCORING, owner=OWNER, limit=1, ttl_s=1.0)
    assert (turn.hint, turn.candidates) == (verdict.hint, verdict.candidates)


async def test_who_lost_a_claim_writes_nothing_of_any_kind(store: Store, clock: Clock) -> None:
    turn_id = await recorded(store)
    assert await store.set_next_state(turn_id, [REPLY])
    assert await claimed(store, JUDGING, "slow") == [turn_id]
    clock.now += 61
    assert await claimed(store, JUDGING, "quick") == [turn_id]
    assert not await store.commit_verdict("slow", a_verdict(turn_id, None, reward=-1.0), None)
    assert await verdict_of(store, turn_id) is None
    verdict = a_verdict(turn_id, HINTS[0], candidates=HINTS, reward=1.0)
    assert await store.commit_verdict("quick", verdict, None)
    assert not await store.commit_verdict("slow", a_verdict(turn_id, None, reward=-1.0), None)

    assert await claimed(store, SCORING, "slow") == [turn_id]
    clock.now += 61
    assert await claimed(store, SCORING, "quick") == [turn_id]
    assert not await store.commit_scores("slow", scores_of(turn_id))
    assert await store.score_of(turn_id) is None
    assert await store.commit_scores("quick", scores_of(turn_id)[:2])
    assert not await store.commit_scores("slow", scores_of(turn_id))
    [sample] = await leased(store)
    assert (sample.reward, len(sample.teachings)) == (1.0, 2)


async def test_a_restart_between_any_two_steps_loses_nothing(
    config: StoreConfig, clock: Clock
) -> None:
    """Every step runs in a store of its own, after the process that claimed the turn has died."""
    spans = (VersionSpan(version=3, start=0, end=3),)
    experts = np.ones((6, 2, 2), dtype=np.int16)
    async with await Store.open(config, clock) as store:
        turn_id = await recorded(
            store, version_spans=spans, teacher_key="math", routed_experts=experts
        )
    async with await Store.open(config, clock) as store:
        assert await store.set_next_state(turn_id, [REPLY])
    async with await Store.open(config, clock) as store:
        assert await claimed(store, JUDGING, "dies") == [turn_id]
    clock.now += 61
    async with await Store.open(config, clock) as store:
        assert await claimed(store, JUDGING, "lives") == [turn_id]
        verdict = a_verdict(turn_id, HINTS[0], candidates=HINTS, reward=0.5)
        assert await store.commit_verdict("lives", verdict, None)
    async with await Store.open(config, clock) as store:
        assert await claimed(store, SCORING, "dies") == [turn_id]
        await store.save_side_samples(turn_id, side_samples())
    clock.now += 61
    async with await Store.open(config, clock) as store:
        [turn] = await store.claim(SCORING, owner="lives", limit=1, ttl_s=60.0)
        assert (turn.candidates, turn.teacher_key) == (HINTS, "math")
        assert await store.commit_scores("lives", scores_of(turn_id))
    async with await Store.open(config, clock) as store:
        assert len(await store.lease(owner="dies", count=1, ttl_s=60.0)) == 1
    clock.now += 61
    async with await Store.open(config, clock) as store:
        [sample] = await leased(store)
    assert (sample.turn_id, sample.reward, sample.hint) == (turn_id, 0.5, HINTS[0])
    assert [one.hint for one in sample.teachings] == list(HINTS)
    assert_same_samples(sample.side_samples, side_samples())
    assert sample.routed_experts is not None
    np.testing.assert_array_equal(sample.routed_experts, experts)
