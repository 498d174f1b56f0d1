"""What an accepted hint leaves behind, and what becomes of it, on both databases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from records.care.deletion import delete_sessions_op
from records.errors import StoreConflict
from records.feedback.feedback import Feedback
from records.hints.likeness import likeness
from records.hints.memory import MAX_TEXTS, MOST_ASKED, remember
from records.hints.texts import measuring_texts
from records.hints.types import (
    Examination,
    Hint,
    HintPrompt,
    HintState,
    HintStatus,
    PromptKind,
    RehearsalBlock,
)
from records.names import DropReason, TurnState
from records.store import Store
from records.tables.models import RecordingRow
from records.turns.recording import RecordingKind
from records.types import CapturedTurn, VersionSpan
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_result,
    a_score,
    a_session,
    a_turn,
    a_verdict,
    a_version,
    a_vote,
    claimed,
)
from tests.records.looking import verdict_of

EXAMINER = "examiner"


async def objected(
    store: Store,
    hint: str = HINT,
    scope: str = SCOPE,
    drop: DropReason | None = None,
    **changes: object,
) -> str:
    """A turn whose verdict has `hint`."""
    turn = a_turn(await a_session(store, scope), **changes)
    await store.record_turn(turn, scope=scope)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, hint), drop)
    return turn.turn_id


async def examined(store: Store, hint: str = HINT, scope: str = SCOPE, **found: Any) -> Hint:
    """A hint of its own turn that was examined and found to be a rule."""
    await objected(store, hint, scope)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=10, ttl_s=60)
    values = {"is_rule": True, **found}
    assert await store.commit_examination(EXAMINER, Examination(hint_id=claim.hint_id, **values))
    return await one(store, claim.hint_id)


async def one(store: Store, hint_id: str) -> Hint:
    """A hint that must exist."""
    found = await store.hint(hint_id)
    assert found is not None
    return found


async def forgotten(store: Store, session_id: str) -> None:
    """Delete a session."""
    await store.write(delete_sessions_op, session_ids=[session_id], reason="forget", now=1.0)


async def test_an_accepted_hint_is_remembered_with_its_source(store: Store) -> None:
    turn_id = await objected(store)
    [hint] = await store.hints()
    assert (hint.text, hint.scope, hint.status) == (HINT, SCOPE, HintStatus.ACTIVE)
    assert (hint.num_confirmed, hint.is_rule, hint.gap) == (1, None, None)
    [source] = await store.hint_sources(hint.hint_id)
    assert (source.turn_id, source.words) == (turn_id, "I wanted Celsius.")
    assert (source.num_votes, source.num_positive) == (3, 3)


async def test_a_dropped_verdict_leaves_no_hint(store: Store) -> None:
    await objected(store, drop=DropReason.HINT_REJECTED)
    assert await store.hints() == []


async def test_what_is_held_out_is_no_hint_and_no_state(store: Store) -> None:
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.keep_states(exclude_hints=(), limit=9) == [turn.turn_id]

    def hold_out(connection: Connection) -> None:
        values = {"kind": RecordingKind.RECORDED, "source": "a.jsonl", "position": 1}
        row = {"turn_id": turn.turn_id, "held_out": True, **values}
        connection.execute(insert(RecordingRow).values(row))

    await store.write(hold_out)
    assert await store.keep_states(exclude_hints=(), limit=9) == []
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, HINT), None)
    assert await store.hints() == []


async def test_the_same_text_is_one_hint_of_its_scope_with_more_sources(store: Store) -> None:
    turn_ids = {await objected(store, text) for text in (HINT, f"  {HINT.upper()} ", HINT)}
    await objected(store, scope="other")
    [other, hint] = await store.hints()
    assert (hint.num_confirmed, other.num_confirmed) == (3, 1)
    assert {one.turn_id for one in await store.hint_sources(hint.hint_id)} == turn_ids
    assert [one.scope for one in await store.hints(scope="other")] == ["other"]


async def test_hints_are_listed_newest_first_page_by_page(store: Store) -> None:
    for number in range(5):
        await objected(store, f"hint {number}")
    first = await store.hints(limit=2)
    second = await store.hints(limit=2, after=first[-1].hint_id)
    third = await store.hints(limit=2, after=second[-1].hint_id)
    texts = [one.text for one in [*first, *second, *third]]
    assert texts == [f"hint {number}" for number in (4, 3, 2, 1, 0)]


async def test_a_turn_that_is_judged_again_counts_once(store: Store) -> None:
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    for text in ("first", "second"):
        assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
        verdict = a_verdict(turn.turn_id, text)
        assert await store.commit_verdict(OWNER, verdict, None)
        if text == "first":
            await store.add_feedback(SCOPE, turn.turn_id, Feedback(text="No, really."))
    [hint] = await store.hints()
    assert (hint.text, hint.num_confirmed) == ("second", 1)


async def trained_hint(store: Store, text: str = "use Celsius") -> tuple[str, Hint]:
    """A rule that version 1 was trained on, and its turn."""
    turn_id = await objected(store, text)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id)])
    await store.lease(owner="trainer", count=1, ttl_s=60)
    await store.commit_step(version=a_version(1), results=[a_result(turn_id)])
    [hint] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    found = Examination(hint_id=hint.hint_id, is_rule=True)
    assert await store.commit_examination(EXAMINER, found)
    return turn_id, hint


@pytest.mark.parametrize("again", ["Use Celsius!", "use  celsius"])
async def test_a_practised_hint_outlives_another_verdict_on_its_turn(
    store: Store, again: str
) -> None:
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    verdict = a_verdict(turn.turn_id, "use Celsius")
    assert await store.commit_verdict(OWNER, verdict, None)
    [hint] = await store.hints()
    await store.set_hint_gap(hint.hint_id, gap=0.5, gap_high=0.6, first=True)
    await store.add_feedback(SCOPE, turn.turn_id, Feedback(text="No, really."))
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, again), None)
    found = {one.text: one for one in await store.hints()}
    if again == "Use Celsius!":
        assert found.keys() == {again}, "nobody had practised the other"
    else:
        assert [(one.hint_id, one.first_gap) for one in found.values()] == [(hint.hint_id, 0.5)]


async def test_what_a_hint_taught_whose_only_turn_is_forgotten_is_to_go_back(store: Store) -> None:
    turn_id, hint = await trained_hint(store)
    other = a_turn(await a_session(store))
    await store.record_turn(other, scope=SCOPE)
    states = [HintState(hint_id=hint.hint_id, turn_id=other.turn_id, held_out=False)]
    await store.set_hint_states(hint.hint_id, states)
    assert await store.taught_at(hint.hint_id) == [other.turn_id, turn_id]
    [turn] = await store.load_turns([turn_id])
    await forgotten(store, turn.session_id)
    now = await one(store, hint.hint_id)
    assert (now.status, now.text, now.trained_since) == (HintStatus.DELETED, "", 1)
    assert await store.taught_at(hint.hint_id) == [other.turn_id]
    assert await store.hint_sources(hint.hint_id) == []


async def test_what_a_hint_taught_that_its_turn_gives_no_more_is_to_go_back(store: Store) -> None:
    turn_id, hint = await trained_hint(store)

    def judged_again(connection: Connection) -> None:
        remember(connection, [a_verdict(turn_id, "be brief")], 2.0)

    await store.write(judged_again)
    now = await one(store, hint.hint_id)
    assert (now.status, now.text) == (HintStatus.DELETED, "")
    assert await store.taught_at(hint.hint_id) == [turn_id]
    [other] = await store.hints(statuses=[HintStatus.ACTIVE])
    assert other.text == "be brief"


async def test_states_of_a_hint_that_went_meanwhile_are_not_written(store: Store) -> None:
    hint = await examined(store, "use Celsius")
    [source] = await store.hint_sources(hint.hint_id)
    state = HintState(hint_id=hint.hint_id, turn_id=source.turn_id, held_out=False)
    await store.delete_hint(hint.hint_id)
    await store.set_hint_states(hint.hint_id, [state])
    await store.set_hint_states("hint_that_never_was", [replace(state, hint_id="x")])
    assert await store.hint_states(hint.hint_id) == []


async def test_a_text_that_trained_never_measures(store: Store) -> None:
    def text(name: str, *, held_out: bool) -> HintPrompt:
        return HintPrompt(
            prompt_id=name,
            hint_id=hint.hint_id,
            kind=PromptKind.OPPOSITE,
            text=name,
            held_out=held_out,
            asked=8,
            followed=8,
            dropped=None,
        )

    await objected(store)
    [hint] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    texts = tuple(text(name, held_out=name in "ac") for name in "abcd")
    found = Examination(hint_id=hint.hint_id, is_rule=True, prompts=texts)
    assert await store.commit_examination(EXAMINER, found)
    first = measuring_texts(await store.hint_prompts(hint.hint_id))
    assert first == {"a"}
    await store.settle_prompts(hint.hint_id, sorted(first))
    assert await store.examine_again(hint.hint_id)
    [again] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    more = tuple(text(name, held_out=name == "f") for name in "efgh")
    found = Examination(hint_id=again.hint_id, is_rule=True, prompts=more)
    assert await store.commit_examination(EXAMINER, found)
    assert measuring_texts(await store.hint_prompts(hint.hint_id)) == {"a", "f"}


async def test_hints_of_other_scopes_that_are_no_rules_stand_in_nobodys_way(store: Store) -> None:
    mine = await examined(store, "use Celsius")
    block = RehearsalBlock.NO_MAJORITY
    for number in range(5):
        await examined(store, f"use Celsius {number}", scope="slips", is_rule=False, block=block)
    rule = await examined(store, "prefer Fahrenheit", scope="rules")
    near = await store.near_hints(mine, limit=4, other_scopes=True)
    assert [one.hint_id for one in near] == [rule.hint_id]


async def test_a_further_objection_revives_one_that_was_given_up(store: Store) -> None:
    hint = await examined(store, "use Celsius")
    await store.set_hint_status(hint.hint_id, HintStatus.STUCK, "40 steps")
    assert [one.hint_id for one in await store.active_hints(9)] == [hint.hint_id], "it is held on"
    await objected(store, "use Celsius")
    now = await one(store, hint.hint_id)
    assert (now.status, now.detail) == (HintStatus.ACTIVE, None)


async def test_unexamined_hints_are_claimed_scope_by_scope(store: Store) -> None:
    for number in range(3):
        await objected(store, f"hint {number}", scope="busy")
    await objected(store, "the only one", scope="quiet")
    found = await store.claim_hints(owner=EXAMINER, limit=2, ttl_s=60)
    assert [one.text for one in found] == ["hint 0", "the only one"]
    assert await store.claim_hints(owner="another", limit=9, ttl_s=60) == [], "one of each scope"
    assert await store.release_hints(EXAMINER, [found[0].hint_id]) == 1
    await objected(store, "hint 2", scope="busy")
    again = await store.claim_hints(owner="another", limit=9, ttl_s=60)
    assert [one.text for one in again] == ["hint 2"], "two users gave it"


async def test_an_examination_counts_only_for_who_holds_the_hint(store: Store) -> None:
    await objected(store)
    [hint] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    examination = Examination(hint_id=hint.hint_id, is_rule=True)
    assert not await store.commit_examination("another", examination)
    assert await store.commit_examination(EXAMINER, examination)
    assert not await store.commit_examination(EXAMINER, examination)
    assert [one.hint_id for one in await store.active_hints(10)] == [hint.hint_id]
    assert await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60) == []


async def test_equal_hints_merge_and_keep_all_sources(store: Store) -> None:
    old = await examined(store, "use Celsius")
    turn_id = await objected(store, "give degrees Celsius")
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    merge = Examination(hint_id=new.hint_id, merged_into=old.hint_id)
    assert await store.commit_examination(EXAMINER, merge)
    assert (await one(store, old.hint_id)).num_confirmed == 2
    merged = await one(store, new.hint_id)
    assert (merged.status, merged.merged_into) == (HintStatus.MERGED, old.hint_id)
    assert turn_id in {one.turn_id for one in await store.hint_sources(old.hint_id)}


async def blocked(store: Store, num_texts: int) -> Hint:
    """A rule with so many texts, none of which the start model follows."""
    prompts = tuple(
        HintPrompt(
            prompt_id=f"p{number}",
            hint_id="",
            kind=PromptKind.OPPOSITE,
            text=f"wish {number}",
            held_out=False,
            asked=8,
            followed=0,
            dropped="the start model does it in 0 of 8 answers",
        )
        for number in range(num_texts)
    )
    await objected(store)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    texts = tuple(replace(one, hint_id=claim.hint_id) for one in prompts)
    found = Examination(hint_id=claim.hint_id, is_rule=True, prompts=texts)
    assert await store.commit_examination(EXAMINER, found)
    await store.set_hint_block(claim.hint_id, RehearsalBlock.NO_COUNTER_LESSONS, "none is usable")
    return await one(store, claim.hint_id)


@pytest.mark.parametrize(("num_texts", "is_looked_at"), [(3, True), (MAX_TEXTS, False)])
async def test_a_further_source_brings_a_hint_without_usable_texts_back(
    store: Store, num_texts: int, is_looked_at: bool
) -> None:
    hint = await blocked(store, num_texts)
    await objected(store)
    assert ((await one(store, hint.hint_id)).is_rule is None) is is_looked_at
    claims = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert [one.hint_id for one in claims] == [hint.hint_id] * is_looked_at


async def test_what_users_say_in_two_sessions_is_asked_again_whether_it_is_a_rule(
    store: Store,
) -> None:
    for is_first in (True, False):
        await objected(store)
        [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
        found = Examination(hint_id=claim.hint_id, block=RehearsalBlock.NOT_A_RULE, num_sessions=1)
        assert await store.commit_examination(EXAMINER, found)
        assert (await one(store, claim.hint_id)).num_confirmed == 2 - is_first


async def test_what_many_sessions_say_at_once_is_asked_again_too(store: Store) -> None:
    await objected(store)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    no_rule = Examination(hint_id=claim.hint_id, block=RehearsalBlock.NOT_A_RULE, num_sessions=1)
    assert await store.commit_examination(EXAMINER, no_rule)
    for _ in range(MOST_ASKED + 1):
        await objected(store)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    enough = replace(no_rule, num_sessions=MOST_ASKED)
    assert await store.commit_examination(EXAMINER, enough)
    assert (await one(store, claim.hint_id)).is_rule is False
    await objected(store)
    assert await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60) == []


async def test_one_source_of_each_session_speaks_for_it(store: Store) -> None:
    chatty = await a_session(store)
    for words in ("first", "", "second", "", ""):
        await gave(store, a_turn(chatty), words)
    await gave(store, a_turn(await a_session(store)), "")
    [hint] = await store.hints()
    found = await store.hint_sessions(hint.hint_id, 8)
    assert [(one.session_id == chatty, one.words) for one in found] == [
        (False, ""),
        (True, "second"),
    ]
    assert len(await store.hint_sessions(hint.hint_id, 1)) == 1


async def gave(store: Store, turn: CapturedTurn, words: str) -> None:
    """A turn after which a user said that, and whose verdict has the hint."""
    await store.record_turn(turn, scope=SCOPE)
    said = {"role": "user", "content": words}
    assert await store.set_next_state(turn.turn_id, [said])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    assert await store.commit_verdict(OWNER, a_verdict(turn.turn_id, HINT), None)


async def test_what_is_said_while_a_hint_is_examined_counts(store: Store) -> None:
    await objected(store)
    [claim] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    await objected(store)
    found = Examination(hint_id=claim.hint_id, block=RehearsalBlock.NOT_A_RULE, num_sessions=1)
    assert await store.commit_examination(EXAMINER, found)
    [again] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert again.hint_id == claim.hint_id
    assert await store.commit_examination(EXAMINER, replace(found, num_sessions=2))
    assert await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60) == []


async def test_so_does_a_hint_that_is_merged_into_it(store: Store) -> None:
    hint = await blocked(store, 3)
    await objected(store, "give degrees Celsius")
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    merge = Examination(hint_id=new.hint_id, merged_into=hint.hint_id)
    assert await store.commit_examination(EXAMINER, merge)
    [again] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert again.hint_id == hint.hint_id


@pytest.mark.parametrize("gives_way", ["merged_into", "contradicted_by"])
async def test_a_hint_that_would_give_way_to_one_that_ended_is_examined_again(
    store: Store, gives_way: str
) -> None:
    old = await examined(store, "use Celsius")
    await objected(store, "use degrees")
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert await store.delete_hint(old.hint_id) is not None
    found = Examination(hint_id=new.hint_id, **{gives_way: old.hint_id})
    assert not await store.commit_examination(EXAMINER, found)
    [again] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    assert again.hint_id == new.hint_id


async def test_a_later_opposite_contradicts(store: Store) -> None:
    old = await examined(store, "use Celsius")
    new = await examined(store, "use Fahrenheit", contradicts=(old.hint_id,))
    ended = await one(store, old.hint_id)
    assert (ended.status, ended.opposed_by) == (HintStatus.CONTRADICTED, new.hint_id)
    assert [one.hint_id for one in await store.active_hints(10)] == [new.hint_id]
    await objected(store, "use Celsius")
    assert (await store.hints(limit=1))[0].hint_id != old.hint_id, "the text is a hint anew"


async def test_a_hint_gives_way_to_an_opposite_that_was_asked_for_since(store: Store) -> None:
    holds = await examined(store, "use Celsius")
    late = await examined(store, "use Fahrenheit", contradicted_by=holds.hint_id)
    ended = await one(store, late.hint_id)
    assert (ended.status, ended.opposed_by) == (HintStatus.CONTRADICTED, holds.hint_id)
    assert [one.hint_id for one in await store.active_hints(10)] == [holds.hint_id]


@pytest.mark.parametrize("hint_id", ["\x00", "hint_\ud800"])
async def test_ids_that_no_database_takes_are_of_no_hint(store: Store, hint_id: str) -> None:
    await objected(store, "use Celsius")
    assert await store.hint(hint_id) is None
    assert await store.hints(after=hint_id) == []
    assert await store.hint_sources(hint_id) == await store.hint_prompts(hint_id) == []
    assert await store.delete_hint(hint_id) is None


async def test_a_source_is_as_old_as_its_turn(store: Store) -> None:
    turn_id = await objected(store, "use Celsius")
    [turn] = await store.load_turns([turn_id])
    [hint] = await store.hints(limit=1)
    [source] = await store.hint_sources(hint.hint_id)
    assert source.created_at == turn.created_at < hint.created_at


async def test_objections_to_what_a_hint_taught_withdraw_it(store: Store) -> None:
    _, old = await trained_hint(store)
    assert (old.trained_since, old.num_steps) == (1, 1)
    spans = (VersionSpan(version=1, start=0, end=3),)
    await objected(store, "use Fahrenheit", version_spans=spans)
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    found = Examination(hint_id=new.hint_id, is_rule=True, contradicts=(old.hint_id,))
    assert await store.commit_examination(EXAMINER, found)
    assert (await one(store, old.hint_id)).status is HintStatus.WITHDRAWN
    deleted = await store.delete_hint(old.hint_id)
    assert deleted is not None
    assert deleted.versions == (1,)


async def test_contradicting_scopes_pause_both_until_somebody_decides(store: Store) -> None:
    mine = await examined(store, "use Celsius", scope="mine")
    theirs = await examined(
        store, "use Fahrenheit", scope="theirs", opposed_elsewhere=(mine.hint_id,)
    )
    for hint, other in ((mine, theirs), (theirs, mine)):
        now = await one(store, hint.hint_id)
        assert (now.status, now.block) == (HintStatus.ACTIVE, RehearsalBlock.OTHER_SCOPE)
        assert now.opposed_by == other.hint_id
    assert await store.delete_hint(mine.hint_id, scope="theirs") is None
    assert await store.delete_hint(mine.hint_id, scope="mine") is not None
    assert (await one(store, theirs.hint_id)).block is None


async def test_near_hints_are_those_with_the_most_words_in_common(store: Store) -> None:
    texts = ("sort hotels by price", "use degrees Celsius", "say Captain", "use short words", "x y")
    for text in texts:
        await examined(store, text)
    await examined(store, "use degrees Kelvin", scope="other")
    hint = await examined(store, "use degrees Fahrenheit")
    near = await store.near_hints(hint)
    assert [one.text for one in near][:2] == ["use degrees Celsius", "use short words"]
    assert len(near) == 4
    assert [one.text for one in await store.near_hints(hint, other_scopes=True)] == [
        "use degrees Kelvin"
    ]


async def test_words_that_most_hints_have_make_none_of_them_near(store: Store) -> None:
    common = (
        "Use room double for the booking.",
        "I prefer the exact amount.",
        "Leave out the title.",
        "Add the code to the answer.",
        "Say only the hotel name.",
    )
    for text in ("Give temperatures in Celsius.", *common):
        await examined(store, text)
    hint = await examined(store, "Always state the temperature in Fahrenheit.")
    near = await store.near_hints(hint, limit=1)
    assert [one.text for one in near] == ["Give temperatures in Celsius."]


def test_likeness_is_1_for_equal_words_and_0_without_a_common_piece() -> None:
    assert likeness("Use Celsius!", ["use celsius", "金額", ""]) == [1.0, 0.0, 0.0]
    assert likeness("", [""]) == [0.0]
    low, high = likeness("keep amounts exact", ["keep titles short", "an exact amount"])
    assert 0 < low < high < 1


async def test_words_and_states_are_kept_with_a_hint(store: Store) -> None:
    words = HintPrompt(
        prompt_id="p",
        hint_id="",
        kind=PromptKind.OPPOSITE,
        text="In Fahrenheit, please.",
        held_out=False,
        asked=0,
        followed=0,
        dropped=None,
    )
    await objected(store)
    [hint] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    prompt = replace(words, hint_id=hint.hint_id)
    found = Examination(hint_id=hint.hint_id, is_rule=True, prompts=(prompt,))
    assert await store.commit_examination(EXAMINER, found)
    assert await store.hint_prompts(hint.hint_id) == [prompt]
    await store.set_prompt_check("p", asked=8, followed=1, dropped="not followed")
    assert (await store.hint_prompts(hint.hint_id))[0].dropped == "not followed"
    turn_id = await objected(store, "another")
    states = [HintState(hint_id=hint.hint_id, turn_id=turn_id, held_out=True)]
    gone = HintState(hint_id=hint.hint_id, turn_id="gone", held_out=False)
    await store.set_hint_states(hint.hint_id, [*states, gone])
    assert await store.hint_states(hint.hint_id) == states


async def test_a_hint_moves_only_where_it_may(store: Store) -> None:
    hint = await examined(store)
    await store.set_hint_gap(hint.hint_id, gap=2.0, gap_high=2.5, first=True)
    await store.set_hint_gap(hint.hint_id, gap=0.1, gap_high=0.2, first=False)
    assert await store.set_hint_status(hint.hint_id, HintStatus.RESTING, "learned")
    now = await one(store, hint.hint_id)
    assert (now.first_gap, now.gap, now.gap_high) == (2.0, 0.1, 0.2)
    assert not await store.set_hint_status(hint.hint_id, HintStatus.RESTING, None)
    with pytest.raises(StoreConflict, match="resting -> stuck"):
        await store.set_hint_status(hint.hint_id, HintStatus.STUCK, None)
    assert await store.set_hint_status(hint.hint_id, HintStatus.WITHDRAWN, None)
    assert not await store.set_hint_status(hint.hint_id, HintStatus.ACTIVE, None)


async def test_forgetting_the_only_source_deletes_the_hint(store: Store) -> None:
    await examined(store)
    [hint] = await store.hints()
    [source] = await store.hint_sources(hint.hint_id)
    states = [HintState(hint_id=hint.hint_id, turn_id=source.turn_id, held_out=False)]
    await store.set_hint_states(hint.hint_id, states)
    await forgotten(store, source.session_id)
    assert await store.hints() == []


async def test_a_merged_hint_survives_on_its_other_sources_with_their_words(store: Store) -> None:
    old = await examined(store, "use Celsius")
    await objected(store, "give degrees Celsius")
    [new] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    merge = Examination(hint_id=new.hint_id, merged_into=old.hint_id)
    assert await store.commit_examination(EXAMINER, merge)
    first = next(
        source for source in await store.hint_sources(old.hint_id) if source.text == "use Celsius"
    )
    await forgotten(store, first.session_id)
    left = await one(store, old.hint_id)
    assert (left.text, left.num_confirmed, left.is_rule) == ("give degrees Celsius", 1, None)
    assert left.status is HintStatus.ACTIVE


async def test_states_are_of_the_scope_and_consented(store: Store) -> None:
    hint = await examined(store, "use Celsius")
    [source] = await store.hint_sources(hint.hint_id)
    stale = await objected(store, "another hint", response={"role": "assistant", "content": "Hm."})
    foreign = await objected(store, "a third", scope="other")
    for reason in (DropReason.SENSITIVE, DropReason.RECORD_ONLY, DropReason.AMBIGUOUS_PARENT):
        turn = a_turn(await a_session(store), drop_reason=reason)
        await store.record_turn(turn, scope=SCOPE)
    for rule in ("tools", "near"):
        found = await store.states_near(hint.hint_id, rule=rule, limit=10)
        assert set(found) == {source.turn_id, stale}
    assert set(await store.keep_states(exclude_hints=[hint.hint_id], limit=10)) == {stale, foreign}


async def test_states_near_are_those_with_the_likest_last_user_message(store: Store) -> None:
    def asks(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    await objected(store, "use Celsius", **asks("weather in Rome please"))
    near = await objected(store, "other", **asks("the weather in Oslo please"))
    far = await objected(store, "third", **asks("book a room"))
    hint = (await store.hints(limit=3))[-1]
    found = await store.states_near(hint.hint_id, rule="near", limit=10)
    assert found[1:] == [near, far]


async def test_accepted_turns_are_those_judged_without_a_hint(store: Store) -> None:
    turn_id = await objected(store)
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    content = a_verdict(turn.turn_id, None, votes=(a_vote(score=-1, hint=""),))
    assert await store.commit_verdict(OWNER, content, DropReason.NO_HINT)
    assert await store.accepted_turns([turn_id, turn.turn_id]) == {turn.turn_id}


async def ready(store: Store, hint: str = HINT) -> str:
    """An objected turn that waits for the trainer."""
    turn_id = await objected(store, hint)
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.commit_scores(OWNER, [a_score(turn_id, hint=hint)])
    return turn_id


async def test_sources_whose_answers_do_what_the_hint_asks_are_none(store: Store) -> None:
    wrong, right = await ready(store), await ready(store)
    [hint] = await store.hints()
    claim = [one.hint_id for one in await store.claim_hints(owner="a", limit=1, ttl_s=60)]
    assert claim == [hint.hint_id]
    assert not await store.refute_sources("another", hint.hint_id, [wrong], "agrees")
    assert await store.refute_sources("a", hint.hint_id, [wrong], "agrees")
    assert [one.turn_id for one in await store.hint_sources(hint.hint_id)] == [right]
    turns = await store.turns([wrong, right])
    assert [(one.state, one.drop_reason) for one in turns] == [
        (TurnState.DROPPED, DropReason.HINT_AGREES),
        (TurnState.READY, None),
    ]
    # It is examined with what is left, and goes with its last source.
    await store.claim_hints(owner="a", limit=1, ttl_s=60)
    assert not await store.refute_sources("a", hint.hint_id, [right], "agrees")
    assert await store.hints() == []


async def test_a_turn_that_is_dropped_since_its_hint_agrees_is_no_source(store: Store) -> None:
    turn_id = await objected(store)
    assert len(await store.hints()) == 1
    assert await claimed(store, TurnState.SCORING) == [turn_id]
    assert await store.drop(OWNER, turn_id, DropReason.HINT_AGREES, "by 0.1 nats")
    assert await store.hints() == []


async def misread(store: Store, *candidates: str) -> str:
    """A turn in scoring whose votes gave these hints."""
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn.turn_id, [REPLY])
    assert await claimed(store, TurnState.JUDGING) == [turn.turn_id]
    verdict = replace(a_verdict(turn.turn_id, candidates[0]), candidates=candidates)
    assert await store.commit_verdict(OWNER, verdict, None)
    assert await claimed(store, TurnState.SCORING) == [turn.turn_id]
    return turn.turn_id


async def test_a_candidate_in_the_first_ones_place_is_what_is_remembered(store: Store) -> None:
    wrong, right = "Give the exact amount.", "Give a round number."
    known = await ready(store, right)
    turn_id = await misread(store, wrong, right, "Round the amount.")
    assert {one.text for one in await store.hints()} == {wrong, right}
    score = a_score(turn_id, hint=right)
    assert await store.commit_scores(OWNER, [score], (wrong, right, "Round the amount."))
    [hint] = await store.hints()
    assert hint.text == right
    sources = await store.hint_sources(hint.hint_id)
    assert {one.turn_id for one in sources} == {known, turn_id}
    assert {one.text for one in sources} == {right}
    verdict = await verdict_of(store, turn_id)
    assert verdict is not None
    assert (verdict.hint, verdict.candidates) == (right, (right,))


async def test_a_later_candidate_that_keeps_its_place_changes_nothing(store: Store) -> None:
    turn_id = await misread(store, "Give the exact amount.", "Give a round number.")
    score = replace(a_score(turn_id, hint="Give a round number."), candidate=1)
    assert await store.commit_scores(OWNER, [score])
    [hint] = await store.hints()
    assert hint.text == "Give the exact amount."


async def test_a_source_is_told_anew_when_its_hint_is_examined(store: Store) -> None:
    turn_id = await misread(store, "Give the exact amount.", "Give a round number.")
    [hint] = await store.hints()
    await store.claim_hints(owner="a", limit=1, ttl_s=60)
    left = {turn_id: ["Give a round number."]}
    assert not await store.refute_sources("a", hint.hint_id, [], "agrees", left)
    [other] = await store.hints()
    assert other.text == "Give a round number."
    assert [one.turn_id for one in await store.hint_sources(other.hint_id)] == [turn_id]
