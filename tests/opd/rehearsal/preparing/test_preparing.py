"""The states of a hint: chosen, and looked at again when their users have gone on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from opd.rehearsal.desk import Desk
from opd.rehearsal.needs import Questions, RehearsalStore
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.preparing.preparing import HintPreparation
from records.hints.types import Hint, HintPrompt, HintSource, HintState, RehearsalBlock
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from tests.opd.rehearsal.builders import a_hint, a_prompt, a_source, a_state

OBJECTED, JUDGED = 10.0, 100.0
HINT = a_hint(first_gap=0.5, created_at=JUDGED)
PLACES = ("Rome", "Oslo", "Bonn", "Lima", "Cork")


class Records:
    """Turns that users asked about the weather, of which the first gave the hint."""

    def __init__(self) -> None:
        self.turns = {
            place: a_state(place, f"How warm is {place}?", created_at=OBJECTED + number)
            for number, place in enumerate(PLACES)
        }
        self.accepted: set[str] = set()
        self.states: list[HintState] = []
        self.sources = [a_source("Rome", created_at=OBJECTED)]
        self.blocks: list[RehearsalBlock | None] = []

    def accept(self, place: str) -> None:
        said = [{"role": "user", "content": "Thanks."}]
        changed = {"created_at": self.turns[place].created_at, "next_state": said}
        self.turns[place] = a_state(place, f"How warm is {place}?", **changed)
        self.accepted.add(place)

    async def hint_states(self, hint_id: str) -> list[HintState]:
        return self.states

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        return [self.turns[turn_id] for turn_id in turn_ids]

    async def states_near(self, hint_id: str, *, rule: str, limit: int) -> list[str]:
        return list(self.turns)[:limit]

    async def hint_sources(self, hint_id: str, limit: int = 100) -> list[HintSource]:
        return self.sources

    async def accepted_turns(self, turn_ids: Sequence[str]) -> set[str]:
        return self.accepted & set(turn_ids)

    async def set_hint_states(self, hint_id: str, states: Sequence[HintState]) -> None:
        self.states = list(states)

    async def hint_prompts(self, hint_id: str) -> list[HintPrompt]:
        return [a_prompt("p0", asked=64, followed=64), a_prompt("p1", asked=64, followed=64)]

    async def settle_prompts(self, hint_id: str, measuring: Sequence[str]) -> None:
        pass

    async def set_hint_block(
        self, hint_id: str, block: RehearsalBlock | None, detail: str | None
    ) -> None:
        self.blocks.append(block)


class Judge:
    """The hint applies everywhere; answers do what it asks where `heeded` says so."""

    def __init__(self) -> None:
        self.heeded: set[str] = set()
        self.asked: list[str] = []

    async def applies(self, hint_text: str, turn: TurnRecord) -> bool | None:
        return True

    async def followed(
        self, words: str, messages: Sequence[Any], tools: object, response: object
    ) -> bool | None:
        place = messages[-1]["content"].removeprefix("How warm is ").removesuffix("?")
        self.asked.append(place)
        return place in self.heeded


class ADesk:
    """A hint changes an answer by two nats."""

    async def place(self, turn: TurnRecord) -> TurnRecord:
        return turn

    async def score(self, place: object, hint: str | None, ids: Sequence[int]) -> object:
        logprobs = np.full(len(ids), -2.0 if hint else 0.0, dtype=np.float32)
        return SimpleNamespace(logprobs=logprobs)


def preparation(records: Records, judge: Judge, most: int = 8) -> HintPreparation:
    return HintPreparation(
        cast(RehearsalStore, records),
        cast(Questions, judge),
        cast(Desk, ADesk()),
        cast(PolicySampler, None),
        RehearsalConfig(max_states=most, start_samples=64),
        asyncio.Semaphore(4),
    )


async def chosen(one: HintPreparation, records: Records, hint: Hint = HINT) -> set[str]:
    await one.prepare(hint)
    return {state.turn_id for state in records.states}


async def test_where_the_opposite_was_taken_after_the_objection_there_is_no_state() -> None:
    """Though the verdict, and with it the hint, came later."""
    records, judge = Records(), Judge()
    for place in ("Rome", "Oslo", "Bonn"):
        records.accept(place)
    judge.heeded = {"Bonn"}
    assert await chosen(preparation(records, judge), records) == {"Rome", "Bonn", "Lima", "Cork"}
    assert sorted(judge.asked) == ["Bonn", "Oslo"], "where the hint came from nobody is asked"


async def test_states_are_looked_at_again_when_their_users_have_gone_on() -> None:
    records, judge = Records(), Judge()
    one = preparation(records, judge, most=5)
    assert await chosen(one, records) == set(PLACES)
    before = {state.turn_id: state.held_out for state in records.states}
    records.accept("Oslo")
    assert await chosen(one, records) == set(PLACES) - {"Oslo"}
    assert {state.turn_id: state.held_out for state in records.states}.items() <= before.items()
    assert await chosen(one, records) == set(PLACES) - {"Oslo"}
    assert judge.asked == ["Oslo"], "asked once"


async def test_a_state_behind_a_further_objection_in_its_session_is_none() -> None:
    records, judge = Records(), Judge()
    one = preparation(records, judge)
    assert await chosen(one, records) == set(PLACES)
    records.sources.append(a_source("Lima", created_at=OBJECTED + 3, session_id="Cork"))
    assert await chosen(one, records) == set(PLACES) - {"Cork"}


async def test_too_few_that_are_left_end_the_practice() -> None:
    records, judge = Records(), Judge()
    one = preparation(records, judge)
    assert await chosen(one, records) == set(PLACES)
    for place in ("Oslo", "Bonn", "Lima"):
        records.accept(place)
    assert await one.prepare(HINT) is None
    assert records.blocks == [RehearsalBlock.NO_STATES]
