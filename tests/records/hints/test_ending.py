"""Hints that end: nothing of them trains any more, and nothing of a deleted one is left to read."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, select

from records.care.deletion import delete_sessions_op
from records.hints.rows import HintPromptRow, HintRow, HintSourceRow
from records.hints.types import Examination, HintState, HintStatus
from records.lessons import steps
from records.lessons.names import LessonKind
from records.lessons.rows import LessonScoreRow
from records.names import DropReason, TurnState
from records.store import Store
from records.tables.models import ScoreRow, VerdictRow, VoteRow
from records.training.share import LessonShares
from tests.records.builders import (
    OWNER,
    TRAINER,
    a_result,
    a_score,
    a_version,
    claimed,
)
from tests.records.hints.test_memory import EXAMINER, examined, objected, one
from tests.records.lessons.builders import ready_lessons

CELSIUS, ALSO_CELSIUS, FAHRENHEIT = "use Celsius", "in Celsius please", "use Fahrenheit"
ENDED = (TurnState.DROPPED, DropReason.HINT_ENDED)


async def rule(store: Store, text: str = CELSIUS, **found: Any) -> tuple[str, str]:
    """(id of an examined hint, id of its turn, which waits for a teacher)."""
    hint = await examined(store, text, **found)
    [source] = await store.hint_sources(hint.hint_id)
    return hint.hint_id, source.turn_id


async def scored(store: Store, turn_id: str) -> None:
    """A turn that waits for a teacher gets its score; no other may wait."""
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id)])


async def became(store: Store, turn_id: str) -> tuple[TurnState, DropReason | None]:
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.state, turn.drop_reason


async def end(store: Store, hint_id: str, how: str) -> None:
    if how == "deleted":
        assert await store.delete_hint(hint_id) is not None
    elif how == "withdrawn":
        assert await store.set_hint_status(hint_id, HintStatus.WITHDRAWN, "users objected")
    elif how == "contradicted":
        await examined(store, FAHRENHEIT, contradicts=(hint_id,))
    else:
        by = await examined(store, FAHRENHEIT)
        await objected(store, CELSIUS)  # a further source has it examined once more
        [claim] = await claim_again(store, hint_id)
        found = Examination(hint_id=claim, contradicted_by=by.hint_id)
        assert await store.commit_examination(EXAMINER, found)


async def claim_again(store: Store, hint_id: str) -> list[str]:
    assert await store.examine_again(hint_id)
    found = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert [claim.hint_id for claim in found] == [hint_id]
    return [claim.hint_id for claim in found]


HOW = pytest.mark.parametrize("how", ["deleted", "withdrawn", "contradicted", "gives way"])


@HOW
@pytest.mark.parametrize("state", [TurnState.SCORING, TurnState.READY])
async def test_turns_that_wait_end_with_their_hint(
    store: Store, how: str, state: TurnState
) -> None:
    hint_id, turn_id = await rule(store)
    if state is TurnState.READY:
        await scored(store, turn_id)
    await end(store, hint_id, how)
    assert await became(store, turn_id) == ENDED


async def test_who_scores_such_a_turn_has_lost_it(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.delete_hint(hint_id) is not None
    assert not await store.commit_scores(OWNER, [a_score(turn_id)])
    assert await became(store, turn_id) == ENDED


@pytest.mark.parametrize("status", [HintStatus.RESTING, HintStatus.STUCK])
async def test_turns_of_a_hint_that_holds_go_on(store: Store, status: HintStatus) -> None:
    hint_id, turn_id = await rule(store)
    _, other = await rule(store, FAHRENHEIT)
    assert await store.set_hint_status(hint_id, status, None)
    assert await became(store, turn_id) == (TurnState.SCORING, None)
    assert await store.delete_hint(hint_id) is not None
    assert await became(store, other) == (TurnState.SCORING, None)


async def test_turns_of_a_merged_hint_go_on_until_what_it_says_ends(store: Store) -> None:
    into, _ = await rule(store)
    turn_id = await objected(store, ALSO_CELSIUS)
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    merged = Examination(hint_id=new.hint_id, merged_into=into)
    assert await store.commit_examination(EXAMINER, merged)
    assert await became(store, turn_id) == (TurnState.SCORING, None)
    assert await store.delete_hint(into) is not None
    assert await became(store, turn_id) == ENDED


@HOW
async def test_a_turn_that_is_given_back_ends_with_its_hint(store: Store, how: str) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60)
    await end(store, hint_id, how)
    assert await became(store, turn_id) == (TurnState.LEASED, None), "a step is being taken"
    assert await store.release_leases(TRAINER) == 1
    assert await became(store, turn_id) == ENDED


async def test_a_turn_that_only_a_lost_checkpoint_trained_ends_with_its_hint(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    await store.lease(owner=TRAINER, count=1, ttl_s=60)
    await store.commit_step(version=a_version(1), results=[a_result(turn_id)])
    assert await store.set_hint_status(hint_id, HintStatus.WITHDRAWN, None)
    assert await became(store, turn_id) == (TurnState.TRAINED, None)
    await store.reconcile([])
    assert await became(store, turn_id) == ENDED


def written(connection: Connection) -> str:
    """All texts that stand where hints, votes and scores do."""
    columns = (
        *(HintRow.text, HintRow.detail, HintSourceRow.text, HintSourceRow.words),
        *(HintPromptRow.text, VerdictRow.hint, VerdictRow.candidates, VoteRow.hint, VoteRow.text),
        *(ScoreRow.hint, LessonScoreRow.hint),
    )
    found = [one for column in columns for one in connection.scalars(select(column))]
    return repr([one for one in found if one])


async def test_nothing_of_a_deleted_hint_is_left_to_read(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert CELSIUS in await store.read(written)
    assert await store.delete_hint(hint_id) is not None
    assert await store.read(written) == "[]"
    votes = await store.vote_summary()
    assert (votes.votes_pos, votes.accepted) == (3, 1), "that somebody objected is known still"


async def test_a_hint_that_is_deleted_during_a_step_leaves_nothing_to_read(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    assert await store.lease(owner=TRAINER, count=1, ttl_s=60)
    assert await store.delete_hint(hint_id) is not None
    await store.commit_step(version=a_version(1), results=[a_result(turn_id)])
    assert await became(store, turn_id) == (TurnState.TRAINED, None)
    assert await store.read(written) == "[]"


async def test_the_states_of_a_deleted_hint_stay(store: Store) -> None:
    """What it taught there is to go back."""
    hint_id, turn_id = await rule(store)
    states = [HintState(hint_id=hint_id, turn_id=turn_id, held_out=False)]
    await store.set_hint_states(hint_id, states)
    assert await store.delete_hint(hint_id) is not None
    assert await store.hint_states(hint_id) == states


async def trained_in(store: Store, version: int, hint_id: str, kind: LessonKind) -> str:
    """A lesson of a hint that this version trained."""
    [lesson_id] = await ready_lessons(store, kind, hint_id=hint_id)
    samples = await store.lease(
        owner=TRAINER, count=1, ttl_s=60, lessons=LessonShares(counter=0, keep=0, hold_s=0)
    )
    if kind is LessonKind.COUNTER:  # takes no batch of its own
        assert samples == []
        await store.write(steps.lease, lesson_ids=[lesson_id], owner=TRAINER, now=1.0, ttl_s=1e9)
    await store.commit_step(version=a_version(version), results=[], lessons=[a_result(lesson_id)])
    return lesson_id


async def test_a_deleted_hint_names_all_versions_that_trained_on_it(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    await store.lease(owner=TRAINER, count=1, ttl_s=60)
    await store.commit_step(version=a_version(1), results=[a_result(turn_id)])
    await trained_in(store, 2, hint_id, LessonKind.HINT)
    await trained_in(store, 3, "another", LessonKind.HINT)
    await trained_in(store, 4, hint_id, LessonKind.COUNTER)
    deleted = await store.delete_hint(hint_id)
    assert deleted is not None
    assert deleted.versions == (1, 2, 4)


async def test_so_does_one_that_goes_with_its_session(store: Store) -> None:
    hint_id, turn_id = await rule(store)
    await trained_in(store, 1, hint_id, LessonKind.HINT)
    await trained_in(store, 2, hint_id, LessonKind.HINT)
    turn = await store.turn(turn_id)
    assert turn is not None
    gone = await store.write(
        delete_sessions_op, session_ids=[turn.session_id], reason="forget", now=1.0
    )
    assert gone.versions == (1, 2)


async def test_reconciling_says_since_when_hints_were_trained(store: Store) -> None:
    """The step before died between the checkpoint's rename and its commit."""
    hint_id, turn_id = await rule(store)
    await scored(store, turn_id)
    lesson_id = (await ready_lessons(store, hint_id=hint_id))[0]
    versions = [(a_version(1), [turn_id]), (a_version(2), [])]
    lessons = [(a_version(1), []), (a_version(2), [lesson_id])]
    await store.reconcile(versions, lessons)
    hint = await one(store, hint_id)
    assert (hint.trained_since, hint.num_steps) == (1, 2)
    await store.reconcile(versions, lessons)
    assert await one(store, hint_id) == hint
    await store.reconcile(versions[:1], lessons[:1])
    hint = await one(store, hint_id)
    assert (hint.trained_since, hint.num_steps) == (1, 1)
    await store.reconcile([])
    hint = await one(store, hint_id)
    assert (hint.trained_since, hint.num_steps) == (None, 0)
