"""Random conversations of two users: every recorded turn has exactly the next state that followed
it, whatever is retried, edited, compacted and interleaved.

The users talk to the finder and the store as the endpoint does. What followed a turn is known here
because its user says so: the messages that its user first sent after having seen its answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from api_proxy.linking.lineage import LineageFinder
from records.config import StoreConfig
from records.messages import Message
from records.names import DropReason
from records.store import Store
from tests.records.builders import a_turn

SAME = ["go on", "yes", "Ok."]
ACTIONS = ["say", "say", "say", "fail", "regenerate", "edit", "compact", "forget_middle"]
Step = tuple[int, str, int, int]
"""Who does what; two numbers choose the words and the place."""
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 9)),
    min_size=2,
    max_size=14,
)


class Endpoint:
    """What the door does with a request, without tokens."""

    def __init__(self, store: Store, scope: str) -> None:
        self.store, self.scope = store, scope
        self.finder = LineageFinder(store, idle_timeout_s=1e9, max_candidates=32)
        self.now = 1000.0

    async def ask(self, messages: Sequence[Message], answer: Message | None) -> tuple[str, str]:
        """(turn, session) of a request; without an answer it fails and leaves no turn."""
        self.now += 1
        lineage = await self.finder.find(
            scope=self.scope, messages=messages, session_id=None, now=self.now
        )
        link = lineage.link
        session_id = await self.store.ensure_session(
            scope=self.scope, external_id=None, session_id=lineage.session_id
        )
        if link.parent is not None and link.next_state:
            await self.store.set_next_state(link.parent.turn_id, list(link.next_state))
        if answer is None:
            return "", session_id
        turn = a_turn(
            session_id,
            messages=list(messages),
            response=answer,
            parent_turn_id=link.parent.turn_id if link.parent else None,
            drop_reason=DropReason.AMBIGUOUS_PARENT if link.ambiguous else None,
        )
        await self.store.record_turn(turn, scope=self.scope)
        return turn.turn_id, session_id


@dataclass
class User:
    """A user, whose words are told from others' by `name` (in all of them, or in the first)."""

    name: str
    endpoint: Endpoint
    is_distinct: bool
    history: list[Message] = field(default_factory=list)
    turns: dict[int, str] = field(default_factory=dict)
    """Place in the history -> the turn that answered there."""
    followed: dict[str, list[Message] | None] = field(default_factory=dict)
    """What its user sent after each turn."""
    exchanges: dict[str, str] = field(default_factory=dict)
    """Prompt and answer of each turn."""
    sessions: set[str] = field(default_factory=set)
    num_said: int = 0

    def words(self, choice: int) -> str:
        self.num_said += 1
        if self.is_distinct or not self.history:
            return f"{self.name} says {self.num_said}"
        return SAME[choice]

    async def act(self, action: str, choice: int, place: int) -> None:
        if not self.history:
            action = "say"
        if action == "say":
            await self.say([{"role": "user", "content": self.words(choice)}], choice)
        elif action == "fail":
            reply = [{"role": "user", "content": self.words(choice)}]
            self.note(reply)
            await self.endpoint.ask([*self.history, *reply], None)
            await self.say(reply, choice)
        elif action == "regenerate":
            self.turns.pop(len(self.history) - 1, None)
            self.history.pop()
            # Another answer: two equal turns could not be told apart.
            await self.answered(choice, is_distinct=True)
        elif action == "edit":
            places = [i for i, one in enumerate(self.history) if one["role"] == "user"][1:]
            if places:
                del self.history[places[place % len(places)] :]
                text = f"{self.name} edits {self.num_said}"
                await self.say([{"role": "user", "content": text}], choice)
        else:
            self.shorten(action, place)
            await self.say([{"role": "user", "content": self.words(choice)}], choice)

    def shorten(self, action: str, place: int) -> None:
        """Put a summary before the newest messages, or leave out some in the middle."""
        kept = 2 + 2 * (place % 2)
        if action == "compact":
            summary = {"role": "user", "content": f"Summary number {self.num_said} of {self.name}"}
            head = [summary]
        else:
            head = self.history[:1]
        if len(self.history) > kept + 1:
            tail = len(self.history) - kept
            self.turns = {
                at - tail + len(head): turn for at, turn in self.turns.items() if at >= tail
            }
            self.history = [*head, *self.history[tail:]]

    def note(self, reply: list[Message]) -> None:
        """`reply` follows the answer that the history ends with, if nothing did before."""
        turn = self.turns.get(len(self.history) - 1)
        if turn is not None and self.followed[turn] is None:
            self.followed[turn] = reply

    async def say(self, reply: list[Message], choice: int) -> None:
        self.note(reply)
        self.history += reply
        await self.answered(choice)

    async def answered(self, choice: int, is_distinct: bool = False) -> None:
        self.num_said += 1
        is_distinct = is_distinct or self.is_distinct
        text = f"Answer {self.num_said} to {self.name}" if is_distinct else SAME[choice]
        answer = {"role": "assistant", "content": text}
        turn, session = await self.endpoint.ask(self.history, answer)
        self.history.append(answer)
        self.exchanges[turn] = json.dumps(self.history)
        self.turns[len(self.history) - 1] = turn
        self.followed[turn] = None
        self.sessions.add(session)


async def play(store: Store, steps: Sequence[Step], is_distinct: bool) -> list[User]:
    endpoint = Endpoint(store, uuid4().hex)
    users = [User(name, endpoint, is_distinct) for name in ("Ann", "Bob")]
    for who, action, choice, place in steps:
        await users[who].act(action, choice, place)
    return users


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StoreConfig:
    return StoreConfig.sqlite(tmp_path_factory.mktemp("store") / "records.db")


async def outcome(config: StoreConfig, steps: Sequence[Step], is_distinct: bool) -> Any:
    async with await Store.open(config) as store:
        users = await play(store, steps, is_distinct)
        found = {}
        for user in users:
            for turn_id in user.followed:
                turn = await store.turn(turn_id)
                assert turn is not None
                found[turn_id] = turn.next_state or None
        return users, found


SETTINGS = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(steps=STEPS)
def test_distinct_conversations_get_exactly_what_followed(
    config: StoreConfig, steps: list[Step]
) -> None:
    users, found = asyncio.run(outcome(config, steps, is_distinct=True))
    for user in users:
        assert {turn: found[turn] for turn in user.followed} == user.followed
    assert not users[0].sessions & users[1].sessions


@SETTINGS
@given(steps=STEPS)
@example(
    steps=[
        (1, "say", 0, 0),
        (1, "say", 1, 0),
        (1, "compact", 1, 0),
        (1, "forget_middle", 1, 0),
        (1, "say", 0, 0),
    ]
)
def test_conversations_of_the_same_words_never_get_what_followed_another(
    config: StoreConfig, steps: list[Step]
) -> None:
    """What cannot be told apart may stay without its next state, but gets no other's.

    Leaving messages out can lead to a prompt that was asked before. If its answer is the same too,
    the two turns are one exchange, and what followed one of them may go to either.
    """
    users, found = asyncio.run(outcome(config, steps, is_distinct=False))
    for user in users:
        for turn in user.followed:
            exchange = user.exchanges[turn]
            equal = [one for one in user.followed if user.exchanges[one] == exchange]
            assert found[turn] is None or found[turn] in [user.followed[one] for one in equal]
