"""What an export holds is what its reader gives back."""

from __future__ import annotations

import numpy as np

from opd.replay.formats.export import read_export
from opd.replay.recorded import Problem, RecordedSession, RecordedTurn
from records.feedback.feedback import Feedback
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.types import TurnRecord
from tests.opd.export.conftest import ARun
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    a_session,
    a_turn,
    a_verdict,
    a_vote,
    claimed,
    following,
)

TOOLS = [{"type": "function", "function": {"name": "warmth", "parameters": {}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "21"}


async def a_tree(store: Store) -> tuple[str, list[str]]:
    """A session whose first turn was continued in two ways, one broken off; a side turn beside."""
    first = a_turn(await a_session(store), tools=TOOLS, response=CALLING)
    then = following(first, RESULT, tools=TOOLS, sampling={"temperature": 0.7})
    otherwise = following(first, RESULT, drop_reason=DropReason.ABORTED, response_ids=[3])
    side = a_turn(
        first.session_id, turn_type=TurnType.SIDE, drop_reason=DropReason.SIDE_TURN, sampling={}
    )
    await store.record_turn(first, scope=SCOPE)
    await store.set_next_state(first.turn_id, [RESULT])
    for turn in (then, otherwise, side):
        await store.record_turn(turn, scope=SCOPE)
    await store.set_next_state(then.turn_id, [REPLY])
    await store.add_feedback(SCOPE, then.turn_id, Feedback(text="Celsius!", external_id="one"))
    await claimed(store, TurnState.JUDGING)
    votes = (a_vote(0), a_vote(1, score=-1, hint="", text="\\boxed{-1}"))
    assert await store.commit_verdict(OWNER, a_verdict(first.turn_id, HINT, votes), None)
    assert await store.add_outcome(SCOPE, 0.25, None, session=first.session_id) is not None
    return first.session_id, [turn.turn_id for turn in (first, then, otherwise, side)]


def is_same(read: RecordedTurn, turn: TurnRecord) -> bool:
    assert read.tokens is not None
    assert read.tokens.prompt_ids.tolist() == turn.prompt_ids.tolist()
    assert read.tokens.response_ids.tolist() == turn.response_ids.tolist()
    assert (read.tools, read.response) == (turn.tools, turn.response)
    return (read.messages, read.next_state) == (turn.messages, turn.next_state)


def test_a_session_comes_back_as_it_was_recorded(a_run: ARun) -> None:
    session_id, turn_ids = a_run.fill(a_tree)
    turns = a_run.fill(lambda store: store.turns(turn_ids))
    assert a_run.export("--what", "sessions").exit_code == 0
    read = list(read_export(a_run.out / "sessions.jsonl"))
    [session] = [one for one in read if isinstance(one, RecordedSession)]
    assert session.session_id == session_id
    assert session.outcome_reward == 0.25
    assert [turn.position for turn in session.turns] == [0, 1, 2, 3]
    assert [turn.parent for turn in session.turns] == [None, 0, 0, None]
    for one, turn in zip(session.turns, turns, strict=True):
        assert is_same(one, turn)
    first, then, _, side = session.turns
    assert first.votes == (a_vote(0).text, "\\boxed{-1}")
    assert then.votes is None
    assert then.next_state[-1]["role"] == "feedback"
    assert then.tokens is not None
    assert then.tokens.temperature == 0.7
    assert then.tokens.rollout_logprobs is not None
    np.testing.assert_array_equal(then.tokens.rollout_logprobs, turns[1].rollout_logprobs)
    # Of a turn without a known temperature nothing says what its log-probs are of.
    assert side.tokens is not None
    assert side.tokens.rollout_logprobs is None
    assert [problem.position for problem in read if isinstance(problem, Problem)] == [3]
