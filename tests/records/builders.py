"""Turns, verdicts, scores and versions with sensible values; the way of a turn to each state."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np

from records.messages import Message
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.training.step_results import SampleResult, TokenFigures
from records.types import (
    CapturedTurn,
    PolicyVersion,
    Score,
    Verdict,
    VersionSpan,
    Vote,
)

SCOPE = "key"
OWNER = "worker"
TRAINER = "trainer"
HINT = "answer in Celsius next time"
USER: Message = {"role": "user", "content": "How warm is it?"}
REPLY: Message = {"role": "user", "content": "I wanted Celsius."}
ANSWER: Message = {"role": "assistant", "content": "It is 70 F."}


def a_turn(session_id: str, **changes: Any) -> CapturedTurn:
    """A trainable turn of 4 prompt and 3 response tokens, sampled under version 0."""
    response_ids = np.asarray(changes.get("response_ids", [7, 8, 9]), dtype=np.int32)
    values: dict[str, Any] = {
        "turn_id": uuid4().hex,
        "session_id": session_id,
        "parent_turn_id": None,
        "turn_type": TurnType.MAIN,
        "messages": [USER],
        "tools": [],
        "response": ANSWER,
        "prompt_ids": np.array([1, 2, 3, 4], dtype=np.int32),
        "rollout_logprobs": np.linspace(-1.0, -0.1, len(response_ids), dtype=np.float32),
        "token_parent_id": None,
        "num_shared_ids": 0,
        "sampling": {"temperature": 1.0},
        "distribution_modified": None,
        "version_spans": (VersionSpan(version=0, start=0, end=len(response_ids)),),
        "finish_reason": "stop",
        "latency_s": 0.25,
    }
    return CapturedTurn(**{**values, **changes, "response_ids": response_ids})


def following(previous: CapturedTurn, message: Message = REPLY, **changes: Any) -> CapturedTurn:
    """The next turn of a conversation, its prompt tokens bridged."""
    history = np.concatenate([previous.prompt_ids, previous.response_ids])
    return a_turn(
        changes.pop("session_id", previous.session_id),
        **{
            "parent_turn_id": previous.turn_id,
            "messages": [*previous.messages, previous.response, message],
            "prompt_ids": np.concatenate([history, np.array([5, 6], dtype=np.int32)]),
            "token_parent_id": previous.turn_id,
            "num_shared_ids": len(history),
            **changes,
        },
    )


def a_vote(index: int = 0, **changes: Any) -> Vote:
    """A positive vote with the usual hint."""
    values: dict[str, Any] = {
        "index": index,
        "score": 1,
        "hint": HINT,
        "text": f"\\boxed{{1}}[HINT_START]{HINT}[HINT_END]",
        "latency_s": 0.5,
        "prompt_tokens": 100,
        "completion_tokens": 20,
    }
    return Vote(**{**values, **changes})


def a_verdict(
    turn_id: str, hint: str | None = HINT, votes: tuple[Vote, ...] = (), **changes: Any
) -> Verdict:
    """A verdict with three votes, unless told otherwise."""
    votes = votes or tuple(a_vote(index) for index in range(3))
    values = {"hint": hint, "votes": votes, "selection": "longest", "judge": "judge-0", **changes}
    return Verdict(turn_id=turn_id, **values)


def a_score(turn_id: str, num_tokens: int = 3, **changes: Any) -> Score:
    """Teacher log-probs under a prompt with two ids inserted."""
    values: dict[str, Any] = {
        "turn_id": turn_id,
        "hint": HINT,
        "teacher": "start",
        "teacher_version": "0",
        "hinted_prompt_ids": np.array([1, 2, 3, 30, 31, 4], dtype=np.int32),
        "teacher_logprobs": np.full(num_tokens, -0.25, dtype=np.float32),
        "latency_s": 0.1,
    }
    return Score(**{**values, **changes})


def a_version(number: int, parent: int | None = None, **changes: Any) -> PolicyVersion:
    """A policy version with a checkpoint name and manifest hash of its own."""
    values: dict[str, Any] = {
        "version": number,
        "parent_version": number - 1 if parent is None else parent,
        "checkpoint": f"step_{number:06d}",
        "manifest_hash": f"manifest-{number}",
        "created_at": 1000.0 + number,
    }
    return PolicyVersion(**{**values, **changes})


def a_result(turn_id: str, num_tokens: int = 3) -> SampleResult:
    """What a step did with a turn."""
    advantages = np.linspace(-0.5, 0.5, num_tokens, dtype=np.float32)
    return SampleResult(
        turn_id=turn_id,
        staleness=1,
        advantage_mean=0.0,
        advantage_abs_max=0.5,
        advantages=advantages,
        figures=some_figures(num_tokens),
    )


def some_figures(num_tokens: int) -> TokenFigures:
    """Numbers that float16 has exactly, and a gap that is not known."""
    ramp = np.arange(num_tokens, dtype=np.float32)
    return TokenFigures(
        log_ratios=((ramp - 1) / 4).astype(np.float32),
        weights=np.full(num_tokens, 0.75, dtype=np.float32),
        entropies=(ramp / 2).astype(np.float32),
        engine_gaps=np.where(ramp == 0, np.nan, ramp / 8).astype(np.float32),
    )


async def a_session(store: Store, scope: str = SCOPE) -> str:
    """A new session."""
    return await store.ensure_session(scope=scope, external_id=None)


async def recorded(store: Store, **changes: Any) -> str:
    """A recorded turn in a session of its own."""
    session_id = changes.pop("session_id", None) or await a_session(store)
    turn = a_turn(session_id, **changes)
    await store.record_turn(turn, scope=SCOPE)
    return turn.turn_id


async def turn_in(store: Store, state: TurnState, **changes: Any) -> str:
    """A new turn driven to `state`; claimed by OWNER in judging and scoring, leased by TRAINER.

    Other turns of the store must not be in the states on the way.
    """
    if state is TurnState.DROPPED:
        return await recorded(store, **{"drop_reason": DropReason.ABORTED, **changes})
    turn_id = await recorded(store, **changes)
    if state is TurnState.REVIEWING:
        await advance(store, turn_id, TurnState.AWAITING_NEXT_STATE)
        assert await claimed(store, TurnState.JUDGING) == [turn_id]
        assert await store.commit_verdict(OWNER, a_verdict(turn_id), None, review=True)
        return turn_id
    steps = [step for step in TurnState if step is not TurnState.REVIEWING]
    for step in steps[: steps.index(state)]:
        await advance(store, turn_id, step)
    if state in (TurnState.JUDGING, TurnState.SCORING):
        assert await claimed(store, state) == [turn_id]
    return turn_id


async def advance(store: Store, turn_id: str, state: TurnState) -> None:
    """Move a turn from `state`, where nobody holds it, to the next one."""
    if state is TurnState.AWAITING_NEXT_STATE:
        assert await store.set_next_state(turn_id, [REPLY])
    elif state is TurnState.JUDGING:
        assert await claimed(store, state) == [turn_id]
        assert await store.commit_verdict(OWNER, a_verdict(turn_id), None)
    elif state is TurnState.SCORING:
        assert await claimed(store, state) == [turn_id]
        turn = await store.turn(turn_id)
        assert turn is not None
        score = a_score(turn_id, len(turn.response_ids))
        assert await store.commit_scores(OWNER, [score])
    elif state is TurnState.READY:
        leased = await store.lease(owner=TRAINER, count=1, ttl_s=60.0)
        assert [sample.turn_id for sample in leased] == [turn_id]
    else:
        turn = await store.turn(turn_id)
        assert turn is not None
        number = await store.next_version()
        result = a_result(turn_id, len(turn.response_ids))
        await store.commit_step(version=a_version(number), results=[result])


async def claimed(store: Store, state: TurnState, owner: str = OWNER, limit: int = 10) -> list[str]:
    """Ids of the turns that a claim gave."""
    turns = await store.claim(state, owner=owner, limit=limit, ttl_s=60.0)
    return [turn.turn_id for turn in turns]


async def state_of(store: Store, turn_id: str) -> TurnState:
    """The state of a turn."""
    turn = await store.turn(turn_id)
    assert turn is not None
    return turn.state
