from __future__ import annotations

import pytest
from sqlalchemy import text

from records.names import DropReason, TurnState
from records.store import Store
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    a_result,
    a_score,
    a_session,
    a_verdict,
    a_version,
    a_vote,
    recorded,
    turn_in,
)
from tests.records.looking import verdict_of, votes_of


async def test_an_empty_store_has_counts_of_zero_and_no_means(store: Store) -> None:
    assert await store.counts() == dict.fromkeys(TurnState, 0)
    assert await store.drops() == {}
    summary = await store.vote_summary()
    assert (summary.accepted, summary.votes_none) == (0, 0)
    assert summary.accept_rate is summary.mean_hint_chars is None
    assert summary.prompt_tokens is summary.completion_tokens is None
    assert await store.mean_score_latency() is None
    assert await store.example_turns(3) == []


async def test_votes_are_summed_by_what_they_say(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    votes = (
        a_vote(0, latency_s=1.0),
        a_vote(1, score=-1, hint="", latency_s=2.0, completion_tokens=None),
        a_vote(2, score=None, hint="", text="", error="timeout", latency_s=6.0),
    )
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, HINT, votes), None)
    rejected = await turn_in(store, TurnState.JUDGING)
    negative = a_verdict(rejected, None, (a_vote(0, score=-1, hint="", latency_s=3.0),))
    assert await store.commit_verdict(OWNER, negative, DropReason.NO_HINT)
    summary = await store.vote_summary()
    assert (summary.votes_none, summary.votes_pos, summary.votes_neg) == (1, 1, 2)
    assert (summary.accepted, summary.accept_rate) == (1, 0.5)
    assert summary.mean_hint_chars == len(HINT)
    assert (summary.prompt_tokens, summary.completion_tokens) == (400, 60)
    assert await votes_of(store, turn_id) == votes
    assert await verdict_of(store, rejected) == negative


async def test_latency_of_scores_is_a_mean_over_all(store: Store) -> None:
    for latency_s in (1.0, 3.0):
        turn_id = await turn_in(store, TurnState.SCORING)
        assert await store.commit_scores(OWNER, [a_score(turn_id, latency_s=latency_s)])
    assert await store.mean_score_latency() == pytest.approx(2.0)


async def test_text_that_no_column_takes_is_stored_readably(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.JUDGING)
    vote = a_vote(0, text="a\x00b\ud83d", hint="c\x00d, e é 日本 🙂")
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, vote.hint, (vote,)), None)
    [stored] = await votes_of(store, turn_id)
    assert (stored.text, stored.hint) == ("a\ufffdb\ufffd", "c\ufffdd, e é 日本 🙂")


async def test_one_example_of_each_version_if_asked(store: Store) -> None:
    trained = []
    for number in (1, 2):
        session_id = await a_session(store)
        turn_ids = [await turn_in(store, TurnState.READY, session_id=session_id) for _ in range(2)]
        await store.lease(owner=OWNER, count=2, ttl_s=60)
        results = [a_result(turn_id) for turn_id in turn_ids]
        await store.commit_step(version=a_version(number, number - 1), results=results)
        trained.append(set(turn_ids))
    found = await store.example_turns(5, one_per_version=True)
    assert [one.sample.version for one in found] == [2, 1]
    for one, turn_ids in zip(found, reversed(trained), strict=True):
        assert one.turn.turn_id in turn_ids
    assert [one.sample.version for one in await store.example_turns(5)] == [2, 2, 1, 1]
    assert [one.sample.version for one in await store.example_turns(1, one_per_version=True)] == [2]


async def test_examples_show_the_way_of_a_turn(store: Store) -> None:
    turn_id = await turn_in(store, TurnState.TRAINED)
    await recorded(store)
    [example] = await store.example_turns(3)
    assert example.turn.turn_id == turn_id
    assert example.turn.next_state == [REPLY]
    assert example.verdict == a_verdict(turn_id)
    assert example.score.hinted_prompt_ids.tolist() == [1, 2, 3, 30, 31, 4]
    assert len(example.sample.advantages) == len(example.turn.response_ids)


async def test_the_newest_turns_that_trained_under_a_hint_of_this_teacher(store: Store) -> None:
    first = await turn_in(store, TurnState.TRAINED)
    second = await turn_in(store, TurnState.TRAINED)
    await turn_in(store, TurnState.READY)
    assert await store.newest_taught("start", limit=8) == {second: HINT, first: HINT}
    assert list(await store.newest_taught("start", limit=1)) == [second]
    assert await store.newest_taught("another", limit=8) == {}
    # As on a cluster, where a job marks what it trained.
    await store.write(lambda connection: connection.execute(text("DELETE FROM samples")))
    assert await store.newest_taught("start", limit=8) == {second: HINT, first: HINT}
