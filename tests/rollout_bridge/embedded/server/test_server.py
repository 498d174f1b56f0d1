"""The embedded engine in a process of its own: what only it promises."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.types import SamplingParams
from tests.contract import tiny_model
from tests.contract.engine_process import embedded_engine, engine_process

PROMPT = list(range(50, 100))
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.build(tmp_path_factory.mktemp("models") / "a", 0)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with embedded_engine(model) as url:
        yield url


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=url) as session:
        yield session


@pytest.fixture
async def client(url: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(url) as client:
        yield client


async def post(http: aiohttp.ClientSession, path: str, body) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    async with http.post(path, data=data, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def running(http: aiohttp.ClientSession) -> int:
    async with http.get("/server_info") as response:
        info = await response.json()
        return info["num_running_reqs"] + info["num_waiting_reqs"]


async def until_idle(http: aiohttp.ClientSession) -> None:
    for _ in range(200):
        if await running(http) == 0:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the engine is still busy")


async def test_batches_and_several_samples_come_as_lists(http) -> None:
    params = {"max_new_tokens": 2, "temperature": 0}
    status, replies = await post(
        http, "/generate", {"input_ids": [[1, 2], [3]], "sampling_params": params}
    )
    assert status == 200
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 1]
    body = {"input_ids": [1, 2], "sampling_params": {**params, "n": 3}, "rid": "many"}
    _, replies = await post(http, "/generate", body)
    assert [reply["meta_info"]["id"] for reply in replies] == ["many_0", "many_1", "many_2"]
    status, _ = await post(http, "/generate", {**body, "stream": True})
    assert status == 400


async def test_all_kinds_of_logprobs_in_one_reply(http) -> None:
    body = {
        "input_ids": [10, 20, 30, 40, 50],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [1, 2],
        "return_text_in_logprobs": True,
    }
    _, reply = await post(http, "/generate", body)
    meta = reply["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [20, 30, 40, 50]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(isinstance(entry[2], str) for entry in meta["input_token_logprobs"])
    assert [row and len(row) for row in meta["input_top_logprobs"]] == [None, 2, 2, 2]
    assert [row and [e[1] for e in row] for row in meta["input_token_ids_logprobs"]] == [
        None,
        [1, 2],
        [1, 2],
        [1, 2],
    ]
    assert len(meta["output_top_logprobs"]) == len(meta["output_token_ids_logprobs"]) == 3
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert entry == top[0]
    score = {**body, "sampling_params": {"max_new_tokens": 0}}
    _, scored = await post(http, "/generate", score)
    assert scored["output_ids"] == []
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert scored["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    for one, other in zip(
        scored["meta_info"]["input_token_logprobs"][1:],
        meta["input_token_logprobs"][1:],
        strict=True,
    ):
        assert one[0] == pytest.approx(other[0], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{nope", "JSON"),
        ([1], "JSON object"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": []}, "cannot be empty"),
        ({}, "should be provided"),
        ({"input_ids": [10**6]}, "Token ids must be"),
        ({"input_ids": [-1]}, "Token ids must be"),
        ({"input_ids": [1], "sampling_params": {"nope": 1}}, "unknown field `nope`"),
        ({"input_ids": [5] * 600}, "longer than the model's context"),
        ({"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 100}}, "exceeds"),
        ({"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 9}, "start_len=9"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1"),
    ],
)
async def test_bad_requests_are_answered_and_harm_nothing(http, body, message: str) -> None:
    status, reply = await post(http, "/generate", body)
    assert status == 400
    assert message in json.dumps(reply)
    async with http.get("/health") as response:
        assert response.status == 200


async def test_whole_context_can_be_scored(client: EngineClient) -> None:
    assert len(await client.score([7] * 512, 500)) == 12
    with pytest.raises(EngineRejected):
        await client.score([7] * 513, 500)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_its_request(http, stream: bool) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 450, "ignore_eos": True},
        "stream": stream,
    }
    task = asyncio.create_task(http.post("/generate", json=body))
    while await running(http) == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    if task.done() and not task.cancelled():
        (await task).close()
    await asyncio.gather(task, return_exceptions=True)
    if stream and not task.cancelled():
        task.result().close()
    await until_idle(http)


async def test_closing_the_clients_iterator_stops_the_request(client, http) -> None:
    stream = client.stream(PROMPT, LONG)
    await anext(stream)
    await stream.aclose()
    await until_idle(http)


async def test_votes_and_turns_reuse_prefixes(client: EngineClient) -> None:
    await client.flush_cache()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    first, *others = await asyncio.gather(*(client.generate(PROMPT, params) for _ in range(4)))
    assert first.cached_tokens == 0
    assert [vote.cached_tokens for vote in others] == [48, 48, 48]
    longer = PROMPT + first.output_ids.tolist() + [3, 4]
    following = await client.generate(longer, params)
    assert following.cached_tokens == 64
    other_tenant = await client.generate(PROMPT, params, cache_key="other")
    assert other_tenant.cached_tokens == 0
    await client.flush_cache()
    assert (await client.generate(PROMPT, params)).cached_tokens == 0


async def test_a_seed_repeats_a_response(http) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 20, "sampling_seed": 11, "ignore_eos": True},
    }
    replies = [(await post(http, "/generate", body))[1]["output_ids"] for _ in range(2)]
    assert replies[0] == replies[1]


async def test_update_without_a_pause_recomputes_what_runs(client, model, tmp_path) -> None:
    other = tiny_model.build(tmp_path / "b", 1)
    final = None
    updated = False
    async for chunk in client.stream(PROMPT, LONG):
        final = chunk.final
        if not updated:
            updated = True
            await client.update_weights(str(other), "1")
    await client.update_weights(str(model), "0")
    assert final is not None
    assert [span.version for span in final.weight_spans] == ["0", "1"]


async def test_updates_are_all_or_nothing(client: EngineClient, model: Path, tmp_path) -> None:
    ids = [*PROMPT, 7, 8]
    before = await client.score(ids, 50)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    damaged = {
        "missing": {key: value for key, value in tensors.items() if key != name},
        "unexpected": {**tensors, "extra": torch.zeros(2)},
        "another shape": {**tensors, name: tensors[name][:-1].clone()},
    }
    for problem, wrong in damaged.items():
        folder = tmp_path / problem.replace(" ", "_")
        shutil.copytree(model, folder)
        changed = {key: value + 1 for key, value in wrong.items()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EngineRejected):
            await client.update_weights(str(folder), "9")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    for folder in ("empty", "torn"):
        with pytest.raises(EngineRejected):
            await client.update_weights(str(tmp_path / folder), "9")
    assert (await client.model_info()).weight_version == "0"
    np.testing.assert_allclose(await client.score(ids, 50), before, atol=1e-5)


async def test_updates_take_several_files_and_the_tied_name(client, model, tmp_path) -> None:
    ids = [*PROMPT, 7, 8]
    before = await client.score(ids, 50)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({key: tensors[key] for key in part}, tmp_path / f"model-{number}.safetensors")
    await client.update_weights(str(tmp_path), "2")
    np.testing.assert_allclose(await client.score(ids, 50), before, atol=1e-5)
    await client.update_weights(str(model), "0")


async def test_health_stays_good_during_a_pause(client: EngineClient, http) -> None:
    await client.pause("retract")
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.post("/pause_generation", json={"mode": "bogus"}) as response:
        assert response.status == 400
    await client.resume()


async def test_requests_waiting_in_a_pause_can_be_aborted(client: EngineClient, http) -> None:
    await client.pause("retract")
    task = asyncio.create_task(client.generate(PROMPT, LONG, request_id="paused"))
    while await running(http) == 0:
        await asyncio.sleep(0.005)
    await client.abort("paused")
    generation = await task
    assert (generation.finish_reason, len(generation.output_ids)) == ("abort", 0)
    await client.resume()


async def test_an_aborted_score_has_no_logprobs(client: EngineClient, http) -> None:
    await client.pause("retract")
    body = {
        "input_ids": [10, 20, 30],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "rid": "scored",
    }
    task = asyncio.create_task(post(http, "/generate", body))
    while await running(http) == 0:
        await asyncio.sleep(0.005)
    await client.abort("scored")
    status, reply = await task
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["meta_info"]["input_token_logprobs"] == []
    await client.resume()


async def test_clients_that_leave_leave_no_traceback_and_a_stop_ends_what_runs_as_aborted(
    model: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_new_tokens=450, ignore_eos=True)
    final = None
    with (
        (tmp_path / "errors").open("w") as errors,
        engine_process(model, errors=errors) as (process, url),
    ):
        await leave_within_requests(int(url.rpartition(":")[2]))
        async with aiohttp.ClientSession(base_url=url) as http:
            assert await running(http) == 0
        async with EngineClient(url) as client:
            async for chunk in client.stream(PROMPT, params):
                if final is None and chunk.final is None:
                    process.terminate()
                final = chunk.final
    assert final is not None
    assert final.finish_reason == "abort"
    assert 0 < len(final.output_ids) < 450
    assert (tmp_path / "errors").read_text() == ""


async def leave_within_requests(port: int) -> None:
    """Each client sends less than it said it would."""
    for path in ("/generate", "/v1/chat/completions", "/pause_generation"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: 99\r\n\r\n"
        writer.write(head.encode() + b'{"input_')
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
