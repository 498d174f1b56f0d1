"""The conversation that every client holds, and what must be recorded of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np

from examples.tool_lab.domain import TOOLS
from records.names import TurnState
from records.types import TurnRecord
from tests.clients.doors.conftest import Lab
from tests.records.looking import list_turns

USERS = ("What is the weather in Karo?", "Thank you. And in Milu?")
FUNCTIONS: list[dict[str, Any]] = [tool["function"] for tool in TOOLS]
MAX_STEPS = 4
"""Requests for one message of the user."""


def run_tool(name: str, arguments: dict[str, Any]) -> str:
    """A tool's result, whatever is asked."""
    assert name in {function["name"] for function in FUNCTIONS}
    return json.dumps({"temp_c": 21, "temp_f": 70, "sky": "sun", "for": sorted(arguments)})


async def recorded(lab: Lab) -> list[TurnRecord]:
    """All turns, oldest first."""
    newest_first = await list_turns(lab.store, limit=100)
    return await lab.store.turns([turn.turn_id for turn in reversed(newest_first)])


async def check_recorded(lab: Lab, users: tuple[str, ...] = USERS) -> list[TurnRecord]:
    """One session, whose turns hold the engine's own ids and go on from each other's; each but the
    last has what followed it as its next state. Tools were called and their results were given.
    """
    turns = await recorded(lab)
    check_sampled(lab, turns)
    assert len(turns) >= 2 * len(users)
    assert len({turn.session_id for turn in turns}) == 1
    for turn, later in pairwise(turns):
        check_step(turn, later)
    assert turns[-1].next_state == []
    messages = [*turns[-1].messages, turns[-1].response]
    assert [m["content"] for m in messages if m["role"] == "user"] == list(users)
    called = [call["id"] for m in messages for call in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert called == answered
    assert len(called) >= len(users)
    return turns


def check_sampled(lab: Lab, turns: list[TurnRecord]) -> None:
    """The turns hold the engine's own ids and log-probs, one turn for each request to it."""
    for turn, exchange in zip(turns, lab.tap.exchanges, strict=True):
        assert turn.prompt_ids.tolist() == exchange.input_ids
        assert turn.response_ids.tolist() == exchange.output_ids
        expected = np.asarray(exchange.output_logprobs, dtype=np.float32)
        assert turn.rollout_logprobs.tolist() == expected.tolist()


def check_step(turn: TurnRecord, later: TurnRecord) -> None:
    """`later` answers what followed `turn`, from its very tokens on."""
    assert later.parent_turn_id == turn.turn_id
    assert turn.state is TurnState.JUDGING
    assert turn.next_state == later.messages[len(turn.messages) + 1 :]
    assert {message["role"] for message in turn.next_state} <= {"tool", "user"}
    sampled = np.concatenate([turn.prompt_ids, turn.response_ids])
    assert later.prompt_ids[: len(sampled)].tolist() == sampled.tolist()
