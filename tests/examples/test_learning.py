"""The lab's bookkeeping around learning: admission, what users objected to, controls."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from examples.tool_lab.controls import rewrite_for
from examples.tool_lab.lab_config import LabConfig
from examples.tool_lab.learning import LearningState, _steer
from examples.tool_lab.preferences import PREFERENCES
from examples.tool_lab.results import objections_by_update
from records.names import DropReason, TurnState, TurnType
from records.types import TurnRecord

BATCH = 16


def a_turn(tool: str) -> TurnRecord:
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return TurnRecord(
        turn_id="t",
        session_id="s",
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        state=TurnState.SCORING,
        drop_reason=None,
        messages=[{"role": "user", "content": "hi"}],
        tools=[],
        response={"role": "assistant", "content": "", "tool_calls": [call]},
        next_state=[{"role": "user", "content": "no"}],
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2], dtype=np.int32),
        rollout_logprobs=np.array([-0.1], dtype=np.float32),
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(),
        finish_reason="stop",
        created_at=0.0,
    )


def steered(turns: dict[TurnState, int], drops: dict[DropReason, int]) -> bool:
    gate = asyncio.Event()
    state = LearningState(turns=turns, drops=drops)
    _steer(gate, state, LabConfig(staleness_eta=1), BATCH)
    return gate.is_set()


def test_new_conversations_begin_until_two_batches_wait() -> None:
    assert steered({TurnState.READY: 31}, {DropReason.NO_HINT: 1000})
    assert not steered({TurnState.READY: 32}, {DropReason.NO_HINT: 1000})


def test_trained_turns_do_not_wait_and_unjudged_ones_count_by_the_accept_rate() -> None:
    half = {DropReason.NO_HINT: 100}
    assert steered({TurnState.TRAINED: 100, TurnState.JUDGING: 40}, half)
    assert not steered({TurnState.TRAINED: 100, TurnState.JUDGING: 80}, half)


def test_objections_are_counted_between_updates() -> None:
    state = LearningState()
    state.seen_at_update = [
        (0, Counter({"content": 2})),
        (1, Counter({"content": 4, "corrected": 1, "declined": 1})),
        (2, Counter({"content": 4, "corrected": 1, "declined": 1})),
        (3, Counter({"content": 14, "corrected": 1, "declined": 1})),
    ]
    assert objections_by_update(state) == [(1, 0.5), (3, 0.0)]


@pytest.mark.parametrize(("tool", "kind"), [("get_weather", "unit"), ("find_hotels", "order")])
def test_controls_replace_the_hint_by_the_wrong_one(tool: str, kind: str) -> None:
    preference = PREFERENCES[kind]
    right = preference.hints[preference.alternative][0]
    contrary = rewrite_for("contrary")
    assert contrary is not None
    assert contrary(a_turn(tool), right) in preference.hints[preference.default]
    off_topic = rewrite_for("off-topic")
    assert off_topic is not None
    own = {text for texts in preference.hints.values() for text in texts}
    assert off_topic(a_turn(tool), right) not in own


def test_control_without_hints_scores_the_original_prompt_and_the_lab_changes_none() -> None:
    none = rewrite_for("none")
    assert none is not None
    assert none(a_turn("get_weather"), "a hint") is None
    assert rewrite_for("judge") is None
