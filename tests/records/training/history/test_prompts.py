"""What a lease says of earlier answers to a turn's prompt, on both databases."""

from __future__ import annotations

from typing import Any

import numpy as np

from records.care.housekeeping import Housekeeping
from records.names import TurnState
from records.store import Store
from records.training.history import prompts
from records.training.history.window import HistoryWindow
from records.types import ReadySample, VersionSpan
from tests.records.builders import (
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    USER,
    a_session,
    a_turn,
    a_verdict,
)
from tests.records.conftest import Clock


async def rewarded(
    store: Store, reward: float, *, version: int = 5, scope: str = SCOPE, **changes: Any
) -> str:
    """A ready turn with a reward and no hint, in a session of its own."""
    session_id = await a_session(store, scope)
    spans = (VersionSpan(version=version, start=0, end=3),)
    turn = a_turn(session_id, version_spans=spans, **changes)
    await store.record_turn(turn, scope=scope)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    claims = await store.claim(TurnState.JUDGING, owner=OWNER, limit=10, ttl_s=60.0)
    assert [one.turn_id for one in claims] == [turn.turn_id]
    verdict = a_verdict(turn.turn_id, None, reward=reward)
    assert await store.commit_verdict(OWNER, verdict, None)
    return turn.turn_id


async def lease(store: Store, count: int, window: HistoryWindow | None) -> list[ReadySample]:
    return await store.lease(owner=TRAINER, count=count, ttl_s=60.0, history=window)


async def test_earlier_answers_to_the_same_prompt_come_along_newest_first(store: Store) -> None:
    for version, reward in ((1, -1.0), (3, 1.0), (4, 0.5)):
        await rewarded(store, reward, version=version)
    await lease(store, 3, None)
    batch = {await rewarded(store, 1.0), await rewarded(store, -1.0)}
    first, second = await lease(store, 2, HistoryWindow(versions=2))
    assert {first.turn_id, second.turn_id} == batch
    # Version 1 is further away than the window, and the batch is not its own past.
    assert [(one.version, one.reward) for one in first.history.recent] == [(4, 0.5), (3, 1.0)]
    assert first.history == second.history
    assert first.history.recent[0].length == 3
    assert first.history.first == ()


async def test_without_a_window_nothing_is_read(store: Store) -> None:
    await rewarded(store, 1.0)
    await lease(store, 1, None)
    await rewarded(store, 1.0)
    [sample] = await lease(store, 1, None)
    assert sample.history.recent == ()


async def test_other_prompts_tools_and_tenants_are_no_past(store: Store) -> None:
    await rewarded(store, 1.0, scope="another")
    await rewarded(store, 1.0, messages=[{**USER, "content": "something else"}])
    await rewarded(store, 1.0, tools=[{"type": "function", "function": {"name": "look"}}])
    await lease(store, 3, None)
    await rewarded(store, 1.0)
    [sample] = await lease(store, 1, HistoryWindow(versions=9))
    assert sample.history.recent == ()


async def test_the_first_answers_come_along_however_old(store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr(prompts, "MOST", 2)
    for version in (1, 2, 3):
        await rewarded(store, float(version), version=version)
    await lease(store, 3, None)
    await rewarded(store, 1.0, version=90)
    [sample] = await lease(store, 1, HistoryWindow(versions=1, first=True))
    assert sample.history.recent == ()
    assert [one.version for one in sample.history.first] == [1, 2]


async def test_a_cut_answer_says_so(store: Store) -> None:
    await rewarded(store, 1.0, finish_reason="length")
    [sample] = await lease(store, 1, None)
    assert sample.is_cut
    assert np.isnan(sample.teacher_logprobs).all()


async def test_a_deleted_session_leaves_the_pass_rate_and_is_counted(
    store: Store, clock: Clock
) -> None:
    kept = await rewarded(store, -1.0, version=4)
    gone = [await rewarded(store, 1.0, version=version) for version in (3, 4)]
    sessions = [turn.session_id for one in gone if (turn := await store.turn(one))]
    unrewarded = await a_session(store)
    await store.record_turn(a_turn(unrewarded), scope=SCOPE)
    keeper = Housekeeping(store, clock)
    deleted = await keeper.delete([*sessions, unrewarded], "forget", patience_s=0.0)
    assert (deleted.num_turns, deleted.num_answers) == (3, 2)
    await lease(store, 1, None)
    await rewarded(store, 1.0)
    [sample] = await lease(store, 1, HistoryWindow(versions=9))
    assert [(one.turn_id, one.reward) for one in sample.history.recent] == [(kept, -1.0)]
    assert (await keeper.delete(sessions, "forget", patience_s=0.0)).num_answers == 0
