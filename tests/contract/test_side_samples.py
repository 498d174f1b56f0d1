"""Side samples that an engine draws: its whole distribution, at each position of a response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from records.names import SideSource, TurnState, TurnType
from records.types import Ids, Logprobs, Score, TurnRecord
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import Generation, ModelInfo, SamplingParams, ScoredTokens
from rollout_bridge.scoring import side_samples
from rollout_bridge.scoring.side_samples import SideSampler, draw_places
from rollout_bridge.scoring.teachers import FrozenTeacher

PROMPT = np.array([7, 30, 31, 90, 12, 55, 140, 9], dtype=np.int32)
HINTED = np.array([7, 30, 31, 90, 12, 55, 17, 18, 140, 9], dtype=np.int32)
RESPONSE = np.array([11, 60, 3, 42, 8, 77], dtype=np.int32)
Result = TypeVar("Result")


def turn(response: Ids = RESPONSE) -> TurnRecord:
    return TurnRecord(
        turn_id="turn",
        session_id="session",
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        state=TurnState.SCORING,
        drop_reason=None,
        messages=[],
        tools=[],
        response={"role": "assistant", "content": ""},
        next_state=[],
        prompt_ids=PROMPT,
        response_ids=response,
        rollout_logprobs=np.zeros(len(response), dtype=np.float32),
        sampling={},
        distribution_modified=None,
        version_spans=(),
        finish_reason="stop",
        created_at=0.0,
    )


def score(response: Ids = RESPONSE) -> Score:
    return Score(
        turn_id="turn",
        hint="hint",
        teacher="teacher",
        teacher_version="0",
        hinted_prompt_ids=HINTED,
        teacher_logprobs=np.zeros(len(response), dtype=np.float32),
        latency_s=0.0,
    )


class Counted:
    """The client, with its requests counted by kind, and how many were ever under way at once."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.calls: list[str] = []
        self.now = self.most = 0

    async def _one(self, name: str, ask: Callable[[], Awaitable[Result]]) -> Result:
        self.calls.append(name)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await ask()
        finally:
            self.now -= 1

    async def draw(
        self, input_ids: Ids, params: SamplingParams, number: int, *, routing_key: str | None = None
    ) -> list[Generation]:
        return await self._one("draw", lambda: self.client.draw(input_ids, params, number))

    async def score_with_topk(
        self, input_ids: Ids, start: int, k: int, *, routing_key: str | None = None
    ) -> ScoredTokens:
        return await self._one(
            "likeliest", lambda: self.client.score_with_topk(input_ids, start, k)
        )

    async def score_tokens(
        self, input_ids: Ids, start: int, token_ids: Ids, *, routing_key: str | None = None
    ) -> Logprobs:
        return await self._one(
            "score", lambda: self.client.score_tokens(input_ids, start, token_ids)
        )

    async def model_info(self) -> ModelInfo:
        return await self.client.model_info()


def own_rows(reference, prompt: Ids, response: Ids = RESPONSE) -> np.ndarray:
    """Log-probs [R, V] at the positions of the response."""
    return reference([*prompt.tolist(), *response.tolist()])[len(prompt) - 1 : -1]


@pytest.mark.parametrize("head", [64, 4])
async def test_draws_are_the_models_distribution(
    client: EngineClient, reference, vocab_size: int, monkeypatch, head: int
) -> None:
    """Whether most draws are made by log-probs, or most are sampled by the engine."""
    monkeypatch.setattr(side_samples, "_HEAD", head)
    number = 300
    engine = Counted(client)
    sampler = SideSampler(engine, SideSource.POLICY, number, vocab_size=vocab_size)
    made, requests = await sampler.make(turn(), FrozenTeacher("teacher", client), score())
    assert requests == len(engine.calls)
    assert engine.most <= 16
    assert made.source is SideSource.POLICY
    assert made.policy_version == int((await client.model_info()).weight_version)
    assert made.ids.shape == (len(RESPONSE), number)
    rows = own_rows(reference, PROMPT)
    expected = np.take_along_axis(rows, made.ids, axis=1)
    np.testing.assert_allclose(made.rollout_logprobs, expected, atol=1e-3)
    hinted = np.take_along_axis(own_rows(reference, HINTED), made.ids, axis=1)
    np.testing.assert_allclose(made.teacher_logprobs, hinted, atol=1e-3)
    best = np.argsort(-rows, axis=1)[:, :head]
    for row, ids, top in zip(rows, made.ids, best, strict=True):
        probs = np.exp(row)
        spread = np.sqrt(probs * (1 - probs) / number)
        shares = np.bincount(ids, minlength=vocab_size) / number
        # Five deviations, and what four draws more are: of a thousand rare tokens, some come twice.
        assert (np.abs(shares - probs) < 5 * spread + 4 / number).all()
        in_head = probs[top].sum()
        assert 0 < np.isin(ids, top).sum() < number, "both ways are tried"
        deviation = np.sqrt(in_head * (1 - in_head) / number)
        assert abs(np.isin(ids, top).mean() - in_head) < 5 * deviation
        # The others among themselves: the mean of what only a draw by their probabilities has.
        others = np.setdiff1d(np.arange(vocab_size), top)
        weights = probs[others] / probs[others].sum()
        mean = float((weights * row[others]).sum())
        deviation = float(np.sqrt((weights * (row[others] - mean) ** 2).sum()))
        drawn = ids[~np.isin(ids, top)]
        assert abs(row[drawn].mean() - mean) < 5 * deviation / np.sqrt(len(drawn))


async def test_the_likeliest_tokens_take_one_request(
    client: EngineClient, reference, vocab_size: int
) -> None:
    engine = Counted(client)
    sampler = SideSampler(engine, SideSource.POLICY_TOP, 5, vocab_size=vocab_size)
    made, requests = await sampler.make(turn(), FrozenTeacher("teacher", client), score())
    assert (engine.calls, requests) == (["likeliest"], 1)
    assert made.source is SideSource.POLICY_TOP
    rows = own_rows(reference, PROMPT)
    best = -np.sort(-rows, axis=1)[:, :5]
    np.testing.assert_allclose(made.rollout_logprobs, best, atol=1e-3)
    np.testing.assert_allclose(np.take_along_axis(rows, made.ids, axis=1), best, atol=1e-3)
    hinted = np.take_along_axis(own_rows(reference, HINTED), made.ids, axis=1)
    np.testing.assert_allclose(made.teacher_logprobs, hinted, atol=1e-3)


@pytest.mark.parametrize("source", [SideSource.POLICY, SideSource.POLICY_TOP])
async def test_long_responses_are_asked_in_stretches(
    client: EngineClient, reference, vocab_size: int, monkeypatch, source: SideSource
) -> None:
    monkeypatch.setattr(side_samples, "_STRETCH", 16)
    monkeypatch.setattr(side_samples, "_HEAD", vocab_size)
    response = np.array([(11 * place) % 190 for place in range(40)], dtype=np.int32)
    engine = Counted(client)
    sampler = SideSampler(engine, source, 7, vocab_size=vocab_size)
    teacher = FrozenTeacher("teacher", client)
    made, _ = await sampler.make(turn(response), teacher, score(response))
    # With the whole vocabulary among the likeliest there is nothing else to be drawn.
    assert engine.calls == ["likeliest"] * 3
    expected = np.take_along_axis(own_rows(reference, PROMPT, response), made.ids, axis=1)
    np.testing.assert_allclose(made.rollout_logprobs, expected, atol=1e-3)


async def test_many_turns_at_once_share_the_slots(client: EngineClient, vocab_size: int) -> None:
    engine = Counted(client)
    sampler = SideSampler(engine, SideSource.POLICY, 24, vocab_size=vocab_size)
    teacher = FrozenTeacher("teacher", client)
    await asyncio.gather(*[sampler.make(turn(), teacher, score()) for _ in range(6)])
    assert 8 < engine.most <= 16
    assert engine.calls.count("likeliest") == 6


def test_places_are_drawn_by_log_probs() -> None:
    head = np.log(np.array([[0.5, 0.2], [0.9, 0.1]], dtype=np.float32))
    places = draw_places(head, 40_000, np.random.default_rng(0), is_all=False)
    shares = [np.bincount(row, minlength=3) / 40_000 for row in places]
    np.testing.assert_allclose(shares, [[0.5, 0.2, 0.3], [0.9, 0.1, 0.0]], atol=0.01)
    whole = draw_places(head, 40_000, np.random.default_rng(0), is_all=True)
    assert whole.max() == 1
    np.testing.assert_allclose(np.bincount(whole[0]) / 40_000, [5 / 7, 2 / 7], atol=0.01)
