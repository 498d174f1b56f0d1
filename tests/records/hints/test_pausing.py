"""Hints of two scopes that say the opposite: paused, until one of them holds no more."""

from __future__ import annotations

from typing import Any

import pytest

from records.hints.types import Examination, Hint, HintStatus, RehearsalBlock
from records.store import Store
from tests.records.hints.test_forgetting import forget
from tests.records.hints.test_memory import EXAMINER, examined, objected, one

CELSIUS, ALSO_CELSIUS, FAHRENHEIT = "use Celsius", "in Celsius please", "use Fahrenheit"
PAUSED = RehearsalBlock.OTHER_SCOPE


async def opposed(store: Store) -> tuple[str, str]:
    """(paused hint, the one of another scope that opposes it) ids."""
    mine = await examined(store, CELSIUS, scope="mine")
    theirs = await examined(store, FAHRENHEIT, scope="theirs", opposed_elsewhere=(mine.hint_id,))
    return mine.hint_id, theirs.hint_id


async def claimed(store: Store) -> Hint:
    [hint] = await store.claim_hints(owner=EXAMINER, limit=1, ttl_s=60)
    return hint


async def found(store: Store, hint_id: str, **what: Any) -> None:
    assert await store.commit_examination(EXAMINER, Examination(hint_id=hint_id, **what))


@pytest.mark.parametrize("block", [None, *RehearsalBlock])
async def test_who_prepares_a_hint_does_not_end_its_pause(
    store: Store, block: RehearsalBlock | None
) -> None:
    """It read the hint minutes ago."""
    mine, theirs = await opposed(store)
    await store.set_hint_block(mine, block, "found late")
    assert not await store.examine_again(mine)
    hint = await one(store, mine)
    assert (hint.block, hint.opposed_by, hint.detail) == (PAUSED, theirs, None)


async def test_a_hint_that_ended_is_not_set_to_be_rehearsed(store: Store) -> None:
    mine, _ = await opposed(store)
    assert await store.set_hint_status(mine, HintStatus.WITHDRAWN, "objected to")
    before = await one(store, mine)
    await store.set_hint_block(mine, RehearsalBlock.NO_STATES, "found late")
    assert await one(store, mine) == before


@pytest.mark.parametrize("how", ["deleted", "withdrawn", "contradicted", "forgotten"])
async def test_a_hint_is_examined_anew_when_the_one_that_opposes_it_ends(
    store: Store, how: str
) -> None:
    mine, theirs = await opposed(store)
    if how == "deleted":
        assert await store.delete_hint(theirs) is not None
    elif how == "withdrawn":
        assert await store.set_hint_status(theirs, HintStatus.WITHDRAWN, None)
    elif how == "contradicted":
        await examined(store, CELSIUS, scope="theirs", contradicts=(theirs,))
    else:
        [source] = await store.hint_sources(theirs)
        await forget(store, source.turn_id)
    hint = await one(store, mine)
    assert (hint.block, hint.opposed_by, hint.is_rule) == (None, None, None)
    assert (await claimed(store)).hint_id == mine
    await found(store, mine, is_rule=True)
    assert [known.hint_id for known in await store.active_hints(9)].count(mine) == 1


async def test_a_second_opponent_holds_it(store: Store) -> None:
    """Only one is written down: the examiner finds the other."""
    mine, theirs = await opposed(store)
    others = await examined(store, FAHRENHEIT, scope="others", opposed_elsewhere=(mine,))
    assert (await one(store, mine)).opposed_by == others.hint_id
    assert await store.delete_hint(theirs) is not None
    assert (await one(store, mine)).block is PAUSED
    assert await store.delete_hint(others.hint_id) is not None
    assert (await one(store, mine)).is_rule is None


async def test_what_ended_while_a_hint_was_examined_does_not_pause_it(store: Store) -> None:
    theirs = await examined(store, FAHRENHEIT, scope="theirs")
    await objected(store, CELSIUS, scope="mine")
    mine = (await claimed(store)).hint_id
    assert await store.delete_hint(theirs.hint_id) is not None
    await found(store, mine, is_rule=True, opposed_elsewhere=(theirs.hint_id,))
    hint = await one(store, mine)
    assert (hint.block, hint.opposed_by) == (None, None)


async def test_who_is_opposed_by_a_merged_hint_is_opposed_by_what_it_went_into(
    store: Store,
) -> None:
    into = await examined(store, ALSO_CELSIUS, scope="mine")
    mine, theirs = await opposed(store)
    # Of another user's words it is examined once more, and found to say the same.
    turns = [source.turn_id for source in await store.hint_sources(mine)]
    await objected(store, CELSIUS, scope="mine")
    await forget(store, turns[0])
    assert (await claimed(store)).hint_id == mine
    await found(store, mine, merged_into=into.hint_id)
    assert (await one(store, mine)).status is HintStatus.MERGED
    assert (await one(store, theirs)).opposed_by == into.hint_id
    now = await one(store, into.hint_id)
    assert (now.block, now.opposed_by) == (PAUSED, theirs)
    assert await store.delete_hint(into.hint_id) is not None
    assert (await one(store, theirs)).block is None
