"""Long prompts, and long sequences to be scored, are computed in pieces: nobody waits for them, and
they come out the same.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from tests.contract import tiny_model
from tests.rollout_bridge.embedded.test_engine import complete, reference, started

LONG = [(i * 7) % 200 for i in range(300)]
SETTINGS = {"max_step_cost": 2_048}
"""Pieces of 45 tokens at the beginning, of 32 at the end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"), 0)


def long_request() -> EngineRequest:
    return EngineRequest(input_ids=LONG, sampling=Sampling(max_new_tokens=4))


def watched(engine: Engine) -> list[str]:
    """What the scheduler does from now on."""
    events: list[str] = []
    rows = engine._scheduler._rows
    decode, prefill, advance, score = rows.decode, rows.prefill, rows.advance, rows.score

    def on_decode(tokens, positions, length, plan):
        events.append(f"decode {len(tokens)}")
        return decode(tokens, positions, length, plan)

    def on_prefill(first_row, sequences, matches):
        events.append(f"prefill {len(sequences)}")
        return prefill(first_row, sequences, matches)

    def on_advance(long, max_cost):
        events.append("piece")
        return advance(long, max_cost)

    def on_score(first_row, group):
        events.append(f"score {len(group)}")
        return score(first_row, group)

    rows.decode, rows.prefill = on_decode, on_prefill  # type: ignore[method-assign]
    rows.advance, rows.score = on_advance, on_score  # type: ignore[method-assign]
    return events


async def test_others_decode_and_begin_between_the_pieces(model: Path) -> None:
    async with started(model, **SETTINGS) as engine:
        other = EngineRequest(input_ids=[5] * 9, sampling=Sampling(max_new_tokens=200))
        long = long_request()
        short = EngineRequest(input_ids=[6] * 9, sampling=Sampling(max_new_tokens=2))
        events = watched(engine)
        await engine.pause("retract")
        for request in (other, long, short):
            engine.submit(request)
        await engine.resume()
        for request in (other, long, short):
            await asyncio.wait_for(request.context.wait(), 30)
    pieces = [at for at, event in enumerate(events) if event == "piece"]
    assert len(pieces) >= 6
    assert all(later - earlier >= 2 for earlier, later in pairwise(pieces))
    # The short one came after the long one, and was over before that began to run.
    assert "decode 2" in events[: pieces[2]]
    for request in (other, long, short):
        expected = reference(model, request.input_ids, request.output_ids)
        assert request.output_logprobs == pytest.approx(expected, abs=1e-3)


async def test_several_long_prompts_take_turns_and_share_what_is_equal(model: Path) -> None:
    async with started(model, max_batch=2, **SETTINGS) as engine:
        votes = [long_request() for _ in range(3)]
        await complete(engine, *votes)
        # The second and third find the first one's blocks.
        assert [vote.cached_tokens for vote in votes] == [0, 288, 288]
        for vote in votes:
            expected = reference(model, LONG, vote.output_ids)
            assert vote.output_logprobs == pytest.approx(expected, abs=1e-3)


async def begun(engine: Engine, request: EngineRequest) -> None:
    """Submit a long request and stop when some of it is computed and some is not."""
    advance = engine._scheduler._rows.advance
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopping(long, max_cost):
        advance(long, max_cost)
        engine._scheduler.paused = True
        engine._scheduler._rows.advance = advance  # type: ignore[method-assign]
        loop.call_soon_threadsafe(reached.set)

    engine._scheduler._rows.advance = stopping  # type: ignore[method-assign]
    engine.submit(request)
    await asyncio.wait_for(reached.wait(), 30)
    assert engine.load == {"num_running_reqs": 0, "num_waiting_reqs": 1}


async def test_a_long_prompt_is_aborted_between_two_pieces(model: Path) -> None:
    async with started(model, **SETTINGS) as engine:
        request = long_request()
        await begun(engine, request)
        await engine.abort(request.rid)
        await asyncio.wait_for(request.context.wait(), 30)
        assert request.finish is not None
        assert request.finish.kind == "abort"
        assert engine.load == {"num_running_reqs": 0, "num_waiting_reqs": 0}
        await engine.resume()
        again = long_request()
        await complete(engine, again)
        assert len(again.output_ids) == 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_new_weights_compute_a_long_prompt_anew(
    model: Path, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_model.build(tmp_path_factory.mktemp("other"), 1)
    async with started(model, **SETTINGS) as engine:
        request = long_request()
        await begun(engine, request)
        await engine.pause(mode)
        await engine.update_weights(str(other), "1", keep_cache=mode == "in_place")
        await engine.resume()
        await asyncio.wait_for(request.context.wait(), 30)
        assert request.spans == [("1", 0)]
        expected = reference(other, LONG, request.output_ids)
        assert request.output_logprobs == pytest.approx(expected, abs=1e-3)


def scored(score_from: int, ids: list[int] = LONG, **changes) -> EngineRequest:
    sampling = Sampling(max_new_tokens=changes.pop("max_new_tokens", 0))
    return EngineRequest(
        input_ids=ids,
        sampling=sampling,
        score_from=score_from,
        num_top=3,
        token_ids=(5, 7),
        **changes,
    )


def assert_same_scores(one: EngineRequest, other: EngineRequest) -> None:
    assert len(one.input_logprobs) == len(one.input_ids) - (one.score_from or 0)
    assert one.input_logprobs == pytest.approx(other.input_logprobs, abs=1e-5)
    assert [[i for _, i in row] for row in one.input_top] == [
        [i for _, i in row] for row in other.input_top
    ]
    for mine, theirs in zip(one.input_top, other.input_top, strict=True):
        assert [p for p, _ in mine] == pytest.approx([p for p, _ in theirs], abs=1e-5)
    for mine, theirs in zip(one.input_chosen, other.input_chosen, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


async def test_others_decode_and_are_scored_between_the_pieces_of_a_long_score(
    model: Path,
) -> None:
    async with started(model, **SETTINGS) as engine:
        other = EngineRequest(input_ids=[5] * 9, sampling=Sampling(max_new_tokens=200))
        long = scored(100)
        short = scored(1, [6] * 9)
        prompt = EngineRequest(input_ids=[6] * 9, sampling=Sampling(max_new_tokens=2))
        events = watched(engine)
        await engine.pause("retract")
        for request in (other, long, short, prompt):
            engine.submit(request)
        await engine.resume()
        for request in (other, long, short, prompt):
            await asyncio.wait_for(request.context.wait(), 30)
    pieces = [at for at, event in enumerate(events) if event == "piece"]
    assert len(pieces) >= 6
    for earlier, later in pairwise(pieces):
        assert any(event.startswith("decode") for event in events[earlier:later])
    # The short ones came after the long one, and were computed before its second piece.
    assert events.index("score 1") < pieces[1]
    assert "decode 2" in events[: pieces[1]]
    expected = reference(model, other.input_ids, other.output_ids)
    assert other.output_logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("score_from", [1, 17, 100, 289, 299])
async def test_scores_in_pieces_equal_those_in_one_go(model: Path, score_from: int) -> None:
    async with started(model) as engine:
        events = watched(engine)
        whole = scored(score_from)
        await complete(engine, whole)
        assert "piece" not in events
    async with started(model, **SETTINGS) as engine:
        events = watched(engine)
        pieces, again = scored(score_from), scored(score_from)
        await complete(engine, pieces)
        assert events.count("piece") >= 6
        # The known context is not computed twice, nor are the results recorded twice.
        await complete(engine, again)
    assert pieces.cached_tokens == 0
    assert again.cached_tokens == (score_from - 1) // 16 * 16
    for request in (pieces, again):
        assert_same_scores(request, whole)
    expected = reference(model, LONG[:score_from], LONG[score_from:])
    assert pieces.input_logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_long_request_is_scored_and_then_sampled_from(model: Path) -> None:
    async with started(model, **SETTINGS) as engine:
        request = scored(50, max_new_tokens=4)
        await complete(engine, request)
    expected = reference(model, LONG[:50], LONG[50:])
    assert request.input_logprobs == pytest.approx(expected, abs=1e-3)
    expected = reference(model, LONG, request.output_ids)
    assert request.output_logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_long_score_is_aborted_between_two_pieces(model: Path) -> None:
    async with started(model, **SETTINGS) as engine:
        request = scored(1)
        await begun(engine, request)
        assert 0 < len(request.input_logprobs) < len(LONG) - 1
        await engine.abort(request.rid)
        await asyncio.wait_for(request.context.wait(), 30)
        assert request.finish is not None
        assert request.finish.kind == "abort"
        assert (request.input_logprobs, request.input_top, request.input_chosen) == ([], [], [])
        assert engine.load == {"num_running_reqs": 0, "num_waiting_reqs": 0}
        await engine.resume()
        again = scored(1)
        await complete(engine, again)
        assert len(again.input_logprobs) == len(LONG) - 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_new_weights_score_a_long_sequence_anew(
    model: Path, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_model.build(tmp_path_factory.mktemp("other"), 1)
    async with started(model, **SETTINGS) as engine:
        request = scored(1)
        await begun(engine, request)
        await engine.pause(mode)
        await engine.update_weights(str(other), "1", keep_cache=mode == "in_place")
        await engine.resume()
        await asyncio.wait_for(request.context.wait(), 30)
        again = scored(1)
        await complete(engine, again)
    assert_same_scores(request, again)
    expected = reference(other, LONG[:1], LONG[1:])
    assert request.input_logprobs == pytest.approx(expected, abs=1e-3)


async def test_long_scores_take_turns_with_long_prompts(model: Path) -> None:
    async with started(model, max_batch=1, **SETTINGS) as engine:
        requests = [scored(40), long_request(), scored(1), long_request()]
        await complete(engine, *requests)
    for request in requests[::2]:
        start = request.score_from or 1
        expected = reference(model, LONG[:start], LONG[start:])
        assert request.input_logprobs == pytest.approx(expected, abs=1e-3)
    assert all(len(request.output_ids) == 4 for request in requests[1::2])
