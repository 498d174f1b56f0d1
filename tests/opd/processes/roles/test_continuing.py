"""The policy answers recorded prompts again, for a verifier that values turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from api_proxy.config import ProxyConfig
from judge.verifier.values import turn_value
from opd.processes.roles.continuing import PolicyContinues
from opd.rehearsal.policy_sampler import PolicySampler
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.worker import ServiceUnavailable
from tests.records.builders import recorded
from tests.records.new_store import new_store

QUESTION = [{"role": "user", "content": "Hello."}]


async def a_turn(folder: Path, rendering: Rendering) -> TurnRecord:
    async with await Store.open(new_store(folder / "records.db")) as store:
        prompt = rendering.prompt_ids(QUESTION, [])
        turn = await store.turn(
            await recorded(store, messages=QUESTION, prompt_ids=prompt.astype(np.int32))
        )
    assert turn is not None
    return turn


def continues(
    engine: EngineClient, rendering: Rendering, max_new_tokens: int = 64
) -> PolicyContinues:
    return PolicyContinues(
        PolicySampler(
            engine,
            rendering,
            temperature=1.0,
            max_new_tokens=max_new_tokens,
            context_length=None,
            pause_mode="retract",
            proxy=ProxyConfig(),
        )
    )


async def test_each_try_is_an_answer_of_the_policy_that_the_verifier_sees(
    lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    turn = await a_turn(tmp_path, rendering)
    seen = []

    async def ask(messages: list) -> float:
        seen.append(messages)
        return 0.5 if len(seen) % 2 else 1.0

    async with EngineClient(lab_engine) as engine:
        found = await turn_value(turn, 4, continues(engine, rendering), ask)
    assert (found.turn_id, found.value, found.tries) == (turn.turn_id, 0.75, 4)
    assert all(messages[:-1] == QUESTION for messages in seen)
    answers = [messages[-1] for messages in seen]
    assert {answer["role"] for answer in answers} == {"assistant"}
    assert all(answer["content"] or answer.get("tool_calls") for answer in answers)


async def test_an_engine_that_is_gone_is_to_be_waited_for(
    rendering: Rendering, tmp_path: Path
) -> None:
    turn = await a_turn(tmp_path, rendering)
    patience = EngineClientConfig(attempts=1)
    async with EngineClient("http://127.0.0.1:9", config=patience) as engine:
        with pytest.raises(ServiceUnavailable, match="the policy's engine"):
            await continues(engine, rendering).answer_again(turn)


async def test_an_answer_that_is_cut_off_or_refused_does_not_count(
    lab_engine: str, rendering: Rendering, tmp_path: Path
) -> None:
    turn = await a_turn(tmp_path, rendering)
    unknown = replace(turn, prompt_ids=np.array([10**6], dtype=np.int32))
    async with EngineClient(lab_engine) as engine:
        assert await continues(engine, rendering, max_new_tokens=1).answer_again(turn) is None
        assert await continues(engine, rendering).answer_again(unknown) is None
