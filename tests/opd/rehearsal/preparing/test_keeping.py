"""What is kept as it is: steps of every kind, not only those that an agent takes most."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.preparing.keeping import Keeping, kinds_in_turn, step_kind
from opd.rehearsal.preparing.preparing import HintPreparation, PreparedHint
from records.hints.types import Hint, HintStatus
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.worker import ServiceUnavailable
from tests.opd.rehearsal.builders import a_hint, a_state


def calling(*names: str) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def a_call(turn_id: str, *names: str) -> TurnRecord:
    return a_state(turn_id, "Please do it.", response=calling(*names))


def an_answer(turn_id: str, to: str) -> TurnRecord:
    messages = [
        {"role": "user", "content": "Please do it."},
        calling(to),
        {"role": "tool", "tool_call_id": to, "content": "{}"},
    ]
    return a_state(turn_id, "", messages=messages)


def test_a_step_is_told_by_the_tools_that_it_calls_and_answers() -> None:
    assert step_kind(a_call("t", "search", "book")) == ((), ("book", "search"))
    assert step_kind(an_answer("t", to="search")) == (("search",), ())
    assert step_kind(a_state("t", "Hello.")) == ((), ())


def test_rare_kinds_come_as_often_as_frequent_ones() -> None:
    turns = [an_answer(f"often{number}", to="search") for number in range(4)]
    turns += [a_call("call0", "book"), a_call("call1", "book"), a_state("plain", "Hello.")]
    assert [turn.turn_id for turn in kinds_in_turn(turns)] == [
        "often0", "call0", "plain", "often1", "call1", "often2", "often3",
    ]  # fmt: skip


class Records:
    """Recorded turns, and hints that ended, each at one of them."""

    def __init__(self, turns: Sequence[str], ended: Sequence[Hint] = ()) -> None:
        self.turns, self.ended = list(turns), list(ended)

    async def hints(self, *, statuses: Collection[HintStatus], limit: int) -> list[Hint]:
        return [one for one in self.ended if one.status in statuses][:limit]

    async def taught_at(self, hint_id: str) -> list[str]:
        return [f"of_{hint_id}"]

    async def keep_states(self, *, exclude_hints: Sequence[str], limit: int) -> list[str]:
        return self.turns[:limit]

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        return [a_state(turn_id, turn_id) for turn_id in turn_ids]


class AskedAtOnce:
    """Says where hints apply, after a while; knows how many it was asked about at a time."""

    def __init__(self, applies_at: Collection[str] = (), *, is_down: bool = False) -> None:
        self.applies_at, self.is_down = applies_at, is_down
        self.asked: list[str] = []
        self.under_way = self.most = 0

    async def is_of_another_kind(self, turn: TurnRecord, hints: Sequence[PreparedHint]) -> bool:
        if self.is_down:
            raise ServiceUnavailable("the judge is down")
        self.asked.append(turn.turn_id)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return turn.turn_id not in self.applies_at


def keeping(records: Records, judge: AskedAtOnce, most: int = 4) -> Keeping:
    config = RehearsalConfig(max_keep_states=most)
    return Keeping(cast(RehearsalStore, records), cast(HintPreparation, judge), config)


def prepared(hint_id: str = "h0", *states: str) -> PreparedHint:
    turns = tuple(a_state(one, one) for one in states)
    return PreparedHint(
        hint=a_hint(hint_id),
        training=turns,
        held_back=(),
        prompts=(),
        wishes=(),
    )


async def kept(one: Keeping, *hints: PreparedHint) -> list[str]:
    return [turn.turn_id for turn in await one.states(hints)]


async def test_candidates_are_asked_about_together_and_no_more_than_are_wanted() -> None:
    judge = AskedAtOnce({"t1", "t2"})
    one = keeping(Records([f"t{number}" for number in range(30)]), judge)
    await one.choose([prepared()], [])
    assert await kept(one, prepared()) == ["t0", "t3", "t4", "t5"]
    assert (judge.most, len(judge.asked)) == (4, 6)
    assert not one.is_due([prepared()], [])
    assert one.is_due([prepared(), prepared("h1")], [])
    assert await kept(one, prepared(), prepared("h1", "t3")) == ["t0", "t4", "t5"]


async def test_that_nothing_is_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = keeping(Records(["t0"]), AskedAtOnce({"t0"}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await one.choose([prepared()], [])
    assert [record.message[:40] for record in caplog.records] == [
        "no recorded state is kept as it is: the "
    ]


async def test_a_judge_that_is_down_leaves_what_is_known() -> None:
    judge = AskedAtOnce()
    one = keeping(Records(["t0", "t1"]), judge)
    assert not one.has_tried
    await one.choose([prepared()], [])
    judge.is_down = True
    with pytest.raises(ServiceUnavailable):
        await one.choose([prepared("h1")], [])
    assert one.has_tried
    assert await kept(one, prepared("h1")) == ["t0", "t1"]
    assert not one.is_due([prepared("h1")], []), "it is not asked again at once"


async def test_hints_that_ended_and_had_trained_are_to_go_back() -> None:
    hints = [
        a_hint("h0", status=HintStatus.DELETED, trained_since=1),
        a_hint("h1", status=HintStatus.CONTRADICTED),
        a_hint("h2", status=HintStatus.WITHDRAWN, trained_since=2),
        a_hint("h3", status=HintStatus.RESTING, trained_since=1),
        a_hint("h4", status=HintStatus.CONTRADICTED, trained_since=1),
    ]
    one = keeping(Records([], hints), AskedAtOnce({"of_h4"}))
    ended = await one.to_bring_back({"h2"})
    assert [hint.hint_id for hint in ended] == ["h0", "h4"]
    assert one.ended(ended, []) == {}, "nobody has looked at their states yet"
    await one.choose([], ended)
    assert one.ended(ended, []) == {"h0": ["of_h0"], "h4": []}
    assert one.ended(ended, [prepared("h5", "of_h0")]) == {"h0": [], "h4": []}
