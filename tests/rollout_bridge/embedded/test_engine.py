"""The engine inside this process: memory pressure, shared work, refusals at start, failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
)

from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.engine import Engine
from rollout_bridge.embedded.errors import UnsupportedModel
from rollout_bridge.embedded.model import self_check
from rollout_bridge.embedded.scheduling.request import EngineRequest, Sampling
from rollout_bridge.embedded.server.server import create_app
from tests.contract import tiny_model

KIB = 1 / 2**20
TOKEN_KIB = 2 * 2 * 16 * 2 * 4 / 1024  # layers x heads x head size x (key, value) x 4 bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("model"), 0)


@asynccontextmanager
async def started(model: Path, **settings) -> AsyncIterator[Engine]:
    engine = Engine(EmbeddedEngineConfig(model=str(model), **settings))
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def complete(engine: Engine, *requests: EngineRequest) -> None:
    for request in requests:
        engine.submit(request)
    for request in requests:
        await asyncio.wait_for(request.context.wait(), 30)


def reference(model: Path, prompt: list[int], output: list[int]) -> list[float]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        rows = network(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    return [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(output)]


async def test_requests_beyond_memory_wait_for_room(model: Path) -> None:
    # Room for 520 tokens, while each of the four expects to need 276.
    async with started(model, kv_cache_gib=520 * TOKEN_KIB * KIB) as engine:
        requests = [
            EngineRequest(
                input_ids=[number + 1] * 20,
                sampling=Sampling(max_new_tokens=300),
            )
            for number in range(4)
        ]
        await complete(engine, *requests)
        assert [request.num_retractions for request in requests] == [0] * 4
        for request in requests:
            assert len(request.output_ids) == 300
            expected = reference(model, request.input_ids, request.output_ids)
            assert request.output_logprobs == pytest.approx(expected, abs=1e-3)


async def test_a_running_request_without_room_is_put_back_and_resumed(model: Path) -> None:
    # Admitted side by side for 256 expected tokens each, both outgrow the room for two.
    async with started(model, kv_cache_gib=560 * TOKEN_KIB * KIB) as engine:
        requests = [
            EngineRequest(input_ids=[number + 1] * 20, sampling=Sampling(max_new_tokens=400))
            for number in range(2)
        ]
        await complete(engine, *requests)
        assert requests[1].num_retractions >= 1
        for request in requests:
            assert len(request.output_ids) == 400
            expected = reference(model, request.input_ids, request.output_ids)
            assert request.output_logprobs == pytest.approx(expected, abs=1e-3)


async def test_more_requests_than_rows_take_turns(model: Path) -> None:
    async with started(model, max_batch=2) as engine:
        requests = [
            EngineRequest(input_ids=[number + 1] * 9, sampling=Sampling(max_new_tokens=5))
            for number in range(7)
        ]
        await complete(engine, *requests)
        assert [len(request.output_ids) for request in requests] == [5] * 7


async def test_a_higher_priority_is_begun_before_all_that_waits(model: Path) -> None:
    def request(priority: int) -> EngineRequest:
        sampling = Sampling(max_new_tokens=5)
        return EngineRequest(input_ids=[3] * 9, sampling=sampling, priority=priority)

    async with started(model, max_batch=1) as engine:
        await engine.pause("retract")
        ordinary, lessons = [request(0) for _ in range(4)], [request(1) for _ in range(2)]
        for one in (*ordinary, *lessons):
            engine.submit(one)
        order: list[EngineRequest] = []

        async def note(one: EngineRequest) -> None:
            await asyncio.wait_for(one.context.wait(), 30)
            order.append(one)

        waits = [asyncio.create_task(note(one)) for one in (*ordinary, *lessons)]
        await engine.resume()
        await asyncio.gather(*waits)
    assert order == [*lessons, *ordinary], "and of equal ones the first to come"


async def test_long_prompts_are_prefilled_in_parts(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("rollout_bridge.embedded.model.runner.PREFILL_CHUNK", 64)
    prompt = [(i * 7) % 200 for i in range(300)]
    async with started(model, max_prefill_tokens=128) as engine:
        long = EngineRequest(input_ids=prompt, sampling=Sampling(max_new_tokens=4))
        short = EngineRequest(input_ids=[5], sampling=Sampling(max_new_tokens=4))
        scored = EngineRequest(input_ids=prompt, score_from=1, sampling=Sampling(max_new_tokens=0))
        await complete(engine, long, short, scored)
    expected = reference(model, prompt, long.output_ids)
    assert long.output_logprobs == pytest.approx(expected, abs=1e-3)
    expected = reference(model, prompt[:1], prompt[1:])
    assert scored.input_logprobs == pytest.approx(expected, abs=1e-3)


async def test_equal_prompts_are_prefilled_once(model: Path, monkeypatch) -> None:
    async with started(model) as engine:
        computed = []
        runner = engine._scheduler._rows._runner
        prefill = runner.prefill

        def counting(cache, first_row, sequences, starts):
            computed.extend(len(ids) - start for ids, start in zip(sequences, starts, strict=True))
            return prefill(cache, first_row, sequences, starts)

        monkeypatch.setattr(runner, "prefill", counting)
        prompt = list(range(100))
        votes = [
            EngineRequest(input_ids=prompt, sampling=Sampling(max_new_tokens=3)) for _ in range(5)
        ]
        await engine.pause("retract")
        for vote in votes:
            engine.submit(vote)
        await engine.resume()
        for vote in votes:
            await asyncio.wait_for(vote.context.wait(), 30)
    # 99 tokens once, and of the other four only what is beyond whole blocks of 16.
    assert computed == [99, 3, 3, 3, 3]


async def test_a_late_request_waits_for_one_step_and_its_own_prefill(model: Path) -> None:
    async with started(model) as engine:
        rows = engine._scheduler._rows
        events: list[str] = []
        decode, prefill = rows.decode, rows.prefill
        late = EngineRequest(input_ids=[3] * 30, sampling=Sampling(max_new_tokens=2), stream=True)

        def watched_decode(*arguments):
            events.append("decode")
            if len(events) == 20:
                # Arrives while this step is under way.
                engine._scheduler.call(lambda: engine._scheduler.submit(late))
                events.append("arrival")
            return decode(*arguments)

        def watched_prefill(first_row, sequences, matches):
            events.append(f"prefill {len(sequences)}")
            return prefill(first_row, sequences, matches)

        rows.decode, rows.prefill = watched_decode, watched_prefill  # type: ignore[method-assign]
        late.context = asyncio.Event()
        others = [
            EngineRequest(input_ids=[number + 1] * 20, sampling=Sampling(max_new_tokens=60))
            for number in range(8)
        ]
        await complete(engine, *others)
    after = events[events.index("arrival") + 1 :]
    assert after[:2] == ["prefill 1", "decode"]
    assert len(late.output_ids) == 2


def test_models_with_other_attention_are_refused(tmp_path: Path, model: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    chunked = {**config, "layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(chunked))
    with pytest.raises(UnsupportedModel, match="only attention to all earlier positions"):
        Engine(EmbeddedEngineConfig(model=str(tmp_path)))


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=str(tmp_path)):
        Engine(EmbeddedEngineConfig(model=str(tmp_path)))


def test_a_model_computed_wrongly_through_the_cache_is_refused(model: Path, monkeypatch) -> None:
    monkeypatch.setattr(self_check, "_gap", lambda one, other: float("nan"))
    with pytest.raises(UnsupportedModel, match="differ"):
        Engine(EmbeddedEngineConfig(model=str(model)))


def test_a_model_with_other_masks_is_refused(tmp_path: Path, model: Path, monkeypatch) -> None:
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = EmbeddedEngineConfig(model=str(tmp_path), context_length=64)
    with pytest.raises(UnsupportedModel, match="bloom: its attention mask contains the positions"):
        Engine(settings)
    monkeypatch.setattr("rollout_bridge.embedded.model.supported._POSITIONS_IN_MASK", ())
    with pytest.raises(UnsupportedModel, match="cannot use the engine's cache"):
        Engine(settings)


@asynccontextmanager
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_a_model_without_chat_template_serves_the_rest(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    async with started(tmp_path) as engine, http(engine) as client:
        messages = [{"role": "user", "content": "Hello"}]
        reply = await client.post("/v1/chat/completions", json={"messages": messages})
        assert reply.status_code == 400
        assert "no chat template" in reply.json()["message"]
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
        assert (await client.post("/generate", json=body)).status_code == 200


async def test_tools_and_tool_messages_reach_the_template(model: Path) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    async with started(model) as engine, http(engine) as client:
        usage = []
        for body in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
            request = {"messages": messages, "max_tokens": 1, **body}
            reply = await client.post("/v1/chat/completions", json=request)
            assert reply.status_code == 200, reply.text
            usage.append(reply.json()["usage"]["prompt_tokens"])
        assert usage[0] == usage[2] < usage[1]
        for broken in ([], [{"content": "x"}], [{"role": "user", "content": 5}]):
            reply = await client.post("/v1/chat/completions", json={"messages": broken})
            assert reply.status_code == 400
            assert reply.json()["object"] == "error"


async def test_a_failed_scheduler_fails_its_requests_and_looks_dead(
    model: Path, monkeypatch
) -> None:
    stopped = asyncio.Event()
    async with started(model) as engine, http(engine) as client:
        engine.on_failure = stopped.set

        def broken(*arguments):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine._scheduler._rows, "decode", broken)
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
        reply = await client.post("/generate", json=body)
        assert reply.status_code == 500
        assert "out of memory" in reply.json()["error"]["message"]
        await asyncio.wait_for(stopped.wait(), 5)
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/generate", json=body)).status_code == 500
        streamed = await client.post("/generate", json={**body, "stream": True})
        assert "out of memory" in streamed.text
