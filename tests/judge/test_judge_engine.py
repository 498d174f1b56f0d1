"""Judge and teacher on a real engine: the tool lab's model votes; scores equal a forward pass."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import numpy as np

from judge.config import JudgeConfig
from judge.worker import JudgeWorker
from records.names import TurnState, TurnType
from records.store import Store
from records.types import CapturedTurn, Verdict, VersionSpan
from rollout_bridge.config import ScoringConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.scoring import ScoringWorker
from tests.records.looking import votes_of
from tests.workers import run_until_left

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tool_lab" / "model"
HINT = "Give temperatures in Celsius."
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]


async def add_turn(store: Store, rendering: Rendering) -> CapturedTurn:
    session_id = await store.ensure_session(scope="s", external_id=None)
    text = "It is 50 F in Oslo."
    response_ids = np.array(
        [*rendering.tokenizer.encode(text), rendering.stop_token_ids[0]], dtype=np.int32
    )
    turn = CapturedTurn(
        turn_id=uuid4().hex,
        session_id=session_id,
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        messages=MESSAGES,
        tools=[],
        response={"role": "assistant", "content": text},
        prompt_ids=rendering.prompt_ids(MESSAGES),
        response_ids=response_ids,
        rollout_logprobs=np.full(len(response_ids), -1.0, dtype=np.float32),
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(VersionSpan(version=0, start=0, end=len(response_ids)),),
        finish_reason="stop",
        latency_s=0.1,
    )
    await store.record_turn(turn, scope="s")
    await store.set_next_state(turn.turn_id, [{"role": "user", "content": "In Celsius, please."}])
    return turn


async def test_votes_of_a_real_model_are_stored_whole(store, lab_engine, rendering):
    turns = [await add_turn(store, rendering) for _ in range(4)]
    config = JudgeConfig(base_url=f"{lab_engine}/v1", model="judge", max_tokens=64)
    worker = JudgeWorker(
        store, config, "judge-1", count_tokens=lambda text: len(rendering.tokenizer.encode(text))
    )
    await run_until_left(store, TurnState.JUDGING, worker)
    for turn in turns:
        votes = await votes_of(store, turn.turn_id)
        assert [vote.index for vote in votes] == [0, 1, 2]
        for vote in votes:
            assert vote.error is None
            assert vote.text
            # Each vote of a turn read the same prompt: instructions, conversation, next state.
            assert vote.prompt_tokens == votes[0].prompt_tokens
            assert vote.prompt_tokens is not None
            assert vote.prompt_tokens > 100
            assert vote.completion_tokens is not None
            assert 0 < vote.completion_tokens <= 64
    summary = await store.vote_summary()
    assert summary.votes_none + summary.votes_pos + summary.votes_neg == 12


async def test_teacher_scores_are_those_of_a_forward_pass(store, lab_engine, rendering):
    import torch
    from transformers import AutoModelForCausalLM

    turn = await add_turn(store, rendering)
    await store.claim(TurnState.JUDGING, owner="test", limit=1, ttl_s=60)
    verdict = Verdict(turn_id=turn.turn_id, votes=(), hint=HINT, selection="longest", judge="test")
    assert await store.commit_verdict("test", verdict, None)
    async with EngineClient(lab_engine, vocab_size=rendering.vocab_size) as client:
        worker = ScoringWorker(
            store, client, rendering, ScoringConfig(expected_version="0"), "scoring-1"
        )
        await run_until_left(store, TurnState.SCORING, worker)
    score = await store.score_of(turn.turn_id)
    assert score is not None
    assert HINT in rendering.decode(score.hinted_prompt_ids)

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids_T = np.concatenate([score.hinted_prompt_ids, turn.response_ids]).astype(np.int64)
    with torch.inference_mode():
        logprobs_TV = model(torch.from_numpy(ids_T)[None]).logits[0].float().log_softmax(-1)
    start = len(score.hinted_prompt_ids)
    expected_R = [
        float(logprobs_TV[start - 1 + position, token])
        for position, token in enumerate(turn.response_ids.tolist())
    ]
    np.testing.assert_allclose(score.teacher_logprobs, expected_R, atol=1e-4)
