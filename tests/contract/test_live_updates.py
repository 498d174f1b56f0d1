"""Agents ask through the proxy while weights are updated again and again, in each pause mode.

What is recorded must be true of every token: the ids, their log-probs, and the version whose
weights sampled it, compared with a plain forward pass under that version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from records.names import DropReason
from records.types import TurnRecord
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.types import PauseMode
from rollout_bridge.rendering.rendering import Rendering
from tests.contract.engine_process import ROOT, embedded_engine
from tests.contract.live_door import WEATHER, Answer, Forward, LiveDoor, live_door, write_endless
from trainer.publishing.publish import PublishedWeights, Publisher

LAB_MODEL = ROOT / "examples" / "tool_lab" / "model"
MODES: tuple[PauseMode, ...] = ("retract", "abort", "in_place")
NUM_AGENTS = 6
NUM_UPDATES = 4
MAX_TOKENS = 100


@pytest.fixture(scope="module")
def served_model(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--engine-model", default=None) or LAB_MODEL)


@pytest.fixture(scope="module")
def live_url(request: pytest.FixtureRequest, served_model: Path) -> Iterator[str]:
    url = request.config.getoption("--engine-url", default=None)
    if url is not None:
        yield url
        return
    # Few rows, so that some requests wait for their turn when an update comes.
    with embedded_engine(served_model, "--max-batch", "4") as url:
        yield url


@pytest.fixture(scope="module")
def folders(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("endless")
    return (
        write_endless(served_model, folder / "even", 1),
        write_endless(served_model, folder / "odd", 2),
    )


@pytest.fixture(scope="module")
def forward(folders: tuple[Path, Path]) -> Iterator[Forward]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Forward(folders)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rendering(served_model: Path) -> Rendering:
    return Rendering.load(str(served_model), RendererConfig(name="qwen3", enable_thinking=False))


@pytest.fixture(autouse=True)
async def served_again(live_url: str, served_model: Path):
    """The engine serves what it served, also after a test that failed half-way."""
    async with EngineClient(live_url) as client:
        before = (await client.model_info()).weight_version
        yield
        await client.resume()
        await client.update_weights(str(served_model), before)


async def converse(door: LiveDoor, number: int, stop: asyncio.Event) -> list[Answer]:
    """One agent's questions, each a conversation of two turns, until `stop`."""
    answers = []
    fields = {"max_tokens": MAX_TOKENS + 7 * number}
    if number % 3 == 1:
        fields["tools"] = [WEATHER]
    if number % 6 == 3:
        fields["top_logprobs"] = 2
    if number == 4:
        fields["parallel_tool_calls"] = False
    if number % 3 == 2:
        fields["tools"] = [WEATHER]
        fields["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    while not stop.is_set():
        messages = [
            {"role": "system", "content": "You help with the weather, hotels and trains."},
            {"role": "user", "content": f"Question {number % 2}: what is the weather in Paris?"},
        ]
        answers.append(await door.ask(messages, number % 2 == 0, **fields))
        messages += [{"role": "assistant", "content": "Sun."}, {"role": "user", "content": "And?"}]
        answers.append(await door.ask(messages, number % 2 == 0, **fields))
    return answers


async def traffic_during(
    door: LiveDoor, meanwhile: Callable[[], Awaitable[object]]
) -> list[Answer]:
    """All agents at once until `meanwhile` is done; an agent that fails ends it."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        agents = [group.create_task(converse(door, n, stop)) for n in range(NUM_AGENTS)]
        await meanwhile()
        stop.set()
    return [answer for agent in agents for answer in agent.result()]


async def traffic_during_updates(door: LiveDoor) -> list[Answer]:
    """Every version is published in the midst of the agents' replies."""

    async def update() -> None:
        for _ in range(NUM_UPDATES):
            await door.in_the_midst(40)
            await door.publish()
        await door.in_the_midst(40)

    return await traffic_during(door, update)


def check_answer(door: LiveDoor, answer: Answer, turn: TurnRecord, rendering: Rendering) -> None:
    """The agent got all that was asked for, and the store holds what it got."""
    assert answer.finish_reason in ("length", "stop", "tool_calls")
    ids = turn.response_ids.tolist()
    if turn.finish_reason == "length":
        assert len(ids) == turn.sampling["max_new_tokens"]
    else:
        assert ids[-1] in (*rendering.stop_token_ids, rendering.tool_call_end_id)
    assert answer.completion_tokens == len(ids)
    assert np.asarray(answer.logprobs, np.float32).tolist() == turn.rollout_logprobs.tolist()
    assert np.isfinite(turn.rollout_logprobs).all()
    check_spans(turn)
    assert {span.version for span in turn.version_spans} <= set(door.allowed_versions(answer))


def check_spans(turn: TurnRecord) -> None:
    """Without a gap from the first token to the last, and never back to older weights."""
    spans = turn.version_spans
    assert (spans[0].start, spans[-1].end) == (0, len(turn.response_ids))
    for one, other in pairwise(spans):
        assert one.end == other.start
        assert one.version < other.version


def drop_of(turn: TurnRecord, rendering: Rendering) -> DropReason | None:
    """Why a turn does not train, but for the rare one whose first token already ended it."""
    ends_at_once = turn.response_ids.tolist() in [[end] for end in rendering.stop_token_ids]
    if ends_at_once and turn.drop_reason is DropReason.EMPTY_RESPONSE:
        return None
    return turn.drop_reason


def largest_gap(forward: Forward, turn: TurnRecord) -> float:
    """Of recorded log-probs to those that the recorded versions' weights give, cache-free."""
    ids, start = np.concatenate([turn.prompt_ids, turn.response_ids]), len(turn.prompt_ids)
    gaps = []
    for span in turn.version_spans:
        expected = forward(ids, start, span.version)[span.start : span.end]
        gaps.append(np.abs(expected - turn.rollout_logprobs[span.start : span.end]).max())
    return float(max(gaps))


def is_plain(turn: TurnRecord) -> bool:
    """Under a grammar engines renormalise: such turns are marked and say nothing here."""
    return turn.distribution_modified != "grammar"


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_every_token_is_of_the_weights_it_names(
    live_url, rendering, folders, forward, tmp_path, mode
) -> None:
    async with live_door(live_url, rendering, folders, tmp_path, mode) as door:
        answers = await traffic_during_updates(door)
        turns = [await door.turn(answer) for answer in answers]
    for answer, turn in zip(answers, turns, strict=True):
        check_answer(door, answer, turn, rendering)
        assert drop_of(turn, rendering) in (None, DropReason.DISTRIBUTION_MODIFIED)
        assert not is_plain(turn) or largest_gap(forward, turn) < 1e-3
    assert {update.version for update in door.updates[:-1]} <= {
        span.version for turn in turns for span in turn.version_spans
    }
    assert max(len(turn.version_spans) for turn in turns) > 1
    num_continued = sum(turn.sampling["num_continuations"] > 0 for turn in turns)
    assert (num_continued > 0) is (mode == "abort")


def new_shape(number: int) -> dict[str, Any]:
    """A wanted form that no engine has seen, whose grammar takes a while to compile."""
    names = [f"place-{number}-{place}" for place in range(400)]
    fields = {f"field_{n}": {"type": "string", "enum": names} for n in range(8)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "json_schema", "json_schema": {"name": "places", "schema": schema}}


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_an_update_while_a_grammar_is_compiled_leaves_nothing_of_older_weights(
    live_url, rendering, folders, forward, tmp_path, mode
) -> None:
    """An engine may refuse to forget its cache then, after it has changed its weights."""
    messages = [{"role": "user", "content": "Where?"}]
    asking = []
    async with live_door(live_url, rendering, folders, tmp_path, mode) as door:

        async def update() -> None:
            for number in range(NUM_UPDATES):
                await door.in_the_midst(40)
                fields = {"response_format": new_shape(number), "max_tokens": 8}
                asking.append(asyncio.create_task(door.ask(messages, number % 2 == 0, **fields)))
                await asyncio.sleep(0.05)
                await door.publish()
            await door.in_the_midst(40)

        answers = await traffic_during(door, update)
        await asyncio.gather(*asking)
        turns = [await door.turn(answer) for answer in answers]
    for answer, turn in zip(answers, turns, strict=True):
        check_answer(door, answer, turn, rendering)
        assert not is_plain(turn) or largest_gap(forward, turn) < 1e-3


async def test_replies_with_a_cache_of_several_weights_are_marked_and_do_not_train(
    live_url, rendering, folders, forward, tmp_path
) -> None:
    async with live_door(live_url, rendering, folders, tmp_path, "in_place") as door:
        answers = await traffic_during_updates(door)
        turns = [await door.turn(answer) for answer in answers]
    mixed = [turn for turn in turns if turn.sampling["mixed_kv"]]
    assert 0 < len(mixed) < len(turns)
    for answer, turn in zip(answers, turns, strict=True):
        check_answer(door, answer, turn, rendering)
        assert turn.sampling["num_continuations"] == 0
        if turn.sampling["mixed_kv"]:
            assert turn.drop_reason is DropReason.MIXED_VERSION
        else:
            assert drop_of(turn, rendering) in (None, DropReason.DISTRIBUTION_MODIFIED)
            assert len(turn.version_spans) == 1
            assert not is_plain(turn) or largest_gap(forward, turn) < 1e-3
    # Not only by the letter: what is marked really is of no one set of weights.
    assert max(largest_gap(forward, turn) for turn in mixed if is_plain(turn)) > 1e-2


async def test_what_older_weights_left_in_the_cache_is_used_for_no_unmarked_reply(
    live_url, rendering, folders, forward, tmp_path
) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris, and in Oslo? " * 3}]
    async with live_door(live_url, rendering, folders, tmp_path, "in_place") as door:
        turns = []
        for _ in range(3):
            for _ in range(3):
                answer = await door.ask(messages, stream=False, max_tokens=20)
                turns.append(await door.turn(answer))
                check_answer(door, answer, turns[-1], rendering)
            await door.publish()
    unmarked = [turn for turn in turns if not turn.sampling["mixed_kv"]]
    # At most the first reply after each update, which the proxy sent without knowing of it.
    assert len(unmarked) >= 7
    assert max(largest_gap(forward, turn) for turn in unmarked) < 1e-3


async def test_mixed_replies_train_where_that_is_configured(
    live_url, rendering, folders, tmp_path
) -> None:
    async with live_door(
        live_url, rendering, folders, tmp_path, "in_place", train_mixed_version=True
    ) as door:
        answers = await traffic_during_updates(door)
        turns = [await door.turn(answer) for answer in answers]
    assert any(turn.sampling["mixed_kv"] for turn in turns)
    assert {drop_of(turn, rendering) for turn in turns} <= {None, DropReason.DISTRIBUTION_MODIFIED}


async def test_requests_that_wait_for_their_turn_survive_an_abort(
    live_url, rendering, folders, forward, tmp_path
) -> None:
    # Which requests wait at that moment is the engine's affair; some do in nearly every round.
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with live_door(live_url, rendering, folders, folder, "abort") as door:
            messages = [{"role": "user", "content": "Tell me about Paris."}]
            asking = [
                asyncio.create_task(door.ask(messages, n % 2 == 0, max_tokens=50))
                for n in range(24)
            ]
            for _ in range(2):
                await door.in_the_midst(10, asking)
                await door.publish()
            answers = await asyncio.gather(*asking)
            turns = [await door.turn(answer) for answer in answers]
        for answer, turn in zip(answers, turns, strict=True):
            check_answer(door, answer, turn, rendering)
            assert drop_of(turn, rendering) is None
            assert largest_gap(forward, turn) < 1e-3
        if any(turn.sampling["num_continuations"] >= len(turn.version_spans) for turn in turns):
            return
    pytest.fail("no request was broken off before its first token")


@pytest.mark.parametrize("mode", MODES)
async def test_an_update_that_fails_costs_no_reply(
    live_url, rendering, folders, forward, tmp_path, mode
) -> None:
    async with live_door(live_url, rendering, folders, tmp_path, mode) as door:
        publisher = Publisher({"policy": door.client}, mode=mode, backoff_s=0.05)
        publisher.served["policy"] = door.updates[-1].version

        async def fail() -> None:
            await door.in_the_midst(20)
            missing = PublishedWeights(version=999, path=str(tmp_path / "no-such-folder"))
            assert await publisher.publish(missing) == ["policy"]

        answers = await traffic_during(door, fail)
        turns = [await door.turn(answer) for answer in answers]
    for answer, turn in zip(answers, turns, strict=True):
        check_answer(door, answer, turn, rendering)
        assert [span.version for span in turn.version_spans] == [door.updates[-1].version]
        assert drop_of(turn, rendering) in (None, DropReason.DISTRIBUTION_MODIFIED)
        assert not is_plain(turn) or largest_gap(forward, turn) < 1e-3


@pytest.mark.parametrize("mode", MODES)
async def test_requests_outlast_a_trainer_that_dies_between_pause_and_resume(
    live_url, rendering, folders, forward, tmp_path, mode
) -> None:
    async with live_door(live_url, rendering, folders, tmp_path, mode) as door:
        messages = [{"role": "user", "content": "Tell me about Paris."}]
        # Long ones: a busy machine reads many tokens at once, and the pause comes in their midst.
        fields = {"max_tokens": 3 * MAX_TOKENS}
        before = [asyncio.create_task(door.ask(messages, n == 0, **fields)) for n in range(2)]
        await door.in_the_midst(5, before)
        async with EngineClient(live_url) as trainer:
            await trainer.pause(mode)
        during = [asyncio.create_task(door.ask(messages, n == 0, **fields)) for n in range(2)]
        for reply in ("streamed", "whole"):
            while await door.metric(f'opd_longest_wait_seconds{{reply="{reply}"}}') < 0.5:
                await asyncio.sleep(0.05)
        assert not any(task.done() for task in during)
        ready = await door.agent._client.get(f"{door.base_url}/readyz")
        assert ready.status_code == 200
        # The next trainer: it knows of no engine what it serves, and brings all to its version.
        door.publisher = Publisher({"policy": door.client}, mode=mode)
        version = door.updates[-1].version
        assert await door.publisher.repair(door.weights(version)) == []
        answers = await asyncio.gather(*before, *during)
        assert await door.metric('opd_longest_wait_seconds{reply="streamed"}') == 0
        turns = [await door.turn(answer) for answer in answers]
    for answer, turn in zip(answers, turns, strict=True):
        check_answer(door, answer, turn, rendering)
        assert drop_of(turn, rendering) is None
        assert largest_gap(forward, turn) < 1e-3
