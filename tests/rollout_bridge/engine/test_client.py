"""The engine client against a server that fails in planned ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineRejected, EngineUnavailable
from rollout_bridge.engine.types import SamplingParams

FAST = EngineClientConfig(
    first_token_timeout_s=0.5,
    between_tokens_timeout_s=0.5,
    total_timeout_s=2,
    score_timeout_s=0.5,
    probe_timeout_s=0.5,
    attempts=3,
    retry_wait_s=0.01,
    retry_wait_max_s=0.02,
)
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_new_tokens=3)


def reply(ids: list[int], finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "prompt_tokens": len(PROMPT),
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        },
    }


DONE = {"type": "length", "length": 3}


class FaultyEngine:
    """Answers /generate with one scripted handler a request; remembers what it was asked."""

    def __init__(self, *handlers: Callable[[web.Request], Awaitable[web.StreamResponse]]):
        self._handlers = list(handlers)
        self.bodies: list[dict[str, Any]] = []
        self.routing_keys: list[str | None] = []
        self.aborted: list[str] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.routing_keys.append(request.headers.get("X-SMG-Routing-Key"))
        handler = self._handlers.pop(0) if len(self._handlers) > 1 else self._handlers[0]
        return await handler(request)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            url = f"http://{host}:{port}"
            async with EngineClient(url, config=FAST, vocab_size=10) as client:
                yield client
        finally:
            await runner.cleanup()


def answer(value: Any, status: int = 200):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(value, status=status)

    return handler


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def events(*values: Any, then: str = "end"):
    """A stream of these events, after which it ends, breaks or hangs."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for value in values:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        if then == "break":
            return await hang_up(request)
        if then == "hang":
            await asyncio.sleep(5)
        return response

    return handler


@pytest.mark.parametrize("fault", [answer({"error": "busy"}, 503), hang_up])
async def test_transport_errors_and_5xx_are_tried_again(fault) -> None:
    engine = FaultyEngine(fault, fault, answer(reply([4, 5, 6], DONE)))
    async with engine.client() as client:
        generation = await client.generate(PROMPT, PARAMS, request_id="r")
    assert generation.output_ids.tolist() == [4, 5, 6]
    assert [body["rid"] for body in engine.bodies] == ["r", "r_retry1", "r_retry2"]


async def test_attempts_are_finite() -> None:
    engine = FaultyEngine(answer({"error": "busy"}, 500))
    async with engine.client() as client:
        with pytest.raises(EngineUnavailable, match="busy"):
            await client.score([1, 2, 3], 1)
    assert len(engine.bodies) == 3


async def test_refusals_are_not_tried_again() -> None:
    engine = FaultyEngine(answer({"error": {"message": "too long"}}, 400))
    async with engine.client() as client:
        with pytest.raises(EngineRejected, match="too long"):
            await client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineRejected, match="too long"):
            await anext(client.stream(PROMPT, PARAMS))
    assert len(engine.bodies) == 2


async def test_nothing_listening_is_unavailable() -> None:
    async with EngineClient("http://127.0.0.1:9", config=FAST) as client:
        with pytest.raises(EngineUnavailable):
            await client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineUnavailable):
            await anext(client.stream(PROMPT, PARAMS))


async def test_a_stream_is_tried_again_before_its_first_token() -> None:
    engine = FaultyEngine(
        answer({}, 502), events(then="break"), events(reply([4]), reply([4, 5, 6], DONE))
    )
    async with engine.client() as client:
        chunks = [chunk async for chunk in client.stream(PROMPT, PARAMS)]
    assert [token for chunk in chunks for token in chunk.new_ids] == [4, 5, 6]
    assert len(engine.bodies) == 3


async def collect(client: EngineClient, seen: list[int]) -> None:
    async for chunk in client.stream(PROMPT, PARAMS, request_id="r"):
        seen += chunk.new_ids


@pytest.mark.parametrize("then", ["break", "end", "hang"])
async def test_a_stream_is_never_tried_again_after_its_first_token(then: str) -> None:
    engine = FaultyEngine(events(reply([4]), reply([4, 5]), then=then))
    seen: list[int] = []
    async with engine.client() as client:
        with pytest.raises(EngineUnavailable):
            await collect(client, seen)
    assert seen == [4, 5]
    assert len(engine.bodies) == 1
    assert engine.aborted == ["r"]


async def test_a_stream_without_a_first_token_times_out() -> None:
    engine = FaultyEngine(events(then="hang"))
    async with engine.client() as client:
        with pytest.raises(EngineUnavailable, match="no first token"):
            await anext(client.stream(PROMPT, PARAMS))
    assert len(engine.aborted) == len(engine.bodies) == 1


async def test_closing_a_stream_aborts_it() -> None:
    engine = FaultyEngine(events(reply([4]), then="hang"))
    async with engine.client() as client:
        stream = client.stream(PROMPT, PARAMS, request_id="r")
        assert (await anext(stream)).new_ids == (4,)
        await stream.aclose()
    assert engine.aborted == ["r"]


async def test_cancelling_a_generation_aborts_it() -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    engine = FaultyEngine(hang)
    async with engine.client() as client:
        task = asyncio.create_task(client.generate(PROMPT, PARAMS, request_id="r"))
        while not engine.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.aborted == ["r"]


async def test_a_slow_scorer_is_unavailable_and_not_asked_again() -> None:
    async def slow(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    engine = FaultyEngine(slow)
    async with engine.client() as client:
        with pytest.raises(EngineUnavailable, match="within"):
            await client.score(PROMPT, 1)
    assert len(engine.bodies) == 1


async def test_scoring_starts_one_before_the_response() -> None:
    value = reply([], {"type": "length", "length": 0})
    value["meta_info"]["input_token_logprobs"] = [[None, 2, None], [-0.5, 3, None]]
    engine = FaultyEngine(answer(value))
    async with engine.client() as client:
        assert (await client.score(PROMPT, 2)).tolist() == [-0.5]
    body = engine.bodies[0]
    assert body["logprob_start_len"] == 1
    assert body["sampling_params"]["max_new_tokens"] == 0


async def test_bad_ids_are_never_sent() -> None:
    engine = FaultyEngine(answer(reply([4], DONE)))
    async with engine.client() as client:
        for ids in ([10], [-1], []):
            with pytest.raises(ValueError, match="input id"):
                await client.generate(ids, PARAMS)
            with pytest.raises(ValueError, match="input id"):
                await client.score(ids, 1)
    assert engine.bodies == []


async def test_keys_and_seed_reach_the_engine() -> None:
    engine = FaultyEngine(answer(reply([1, 2, 3], DONE)))
    async with engine.client() as client:
        params = SamplingParams(max_new_tokens=3, seed=-5)
        await client.generate(PROMPT, params, routing_key="s", cache_key="7")
        await client.generate(PROMPT, PARAMS)
    assert engine.routing_keys == ["s", None]
    assert [body.get("extra_key") for body in engine.bodies] == ["7", None]
    assert [body["sampling_params"].get("sampling_seed") for body in engine.bodies] == [-5, None]


async def test_streams_carry_the_keys_too() -> None:
    engine = FaultyEngine(events(reply([1, 2, 3], DONE)))
    async with engine.client() as client:
        async for _ in client.stream(PROMPT, PARAMS, routing_key="s", cache_key="7"):
            pass
    assert (engine.routing_keys, engine.bodies[0]["extra_key"]) == (["s"], "7")


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_a_seed_that_servers_refuse_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        SamplingParams(seed=seed)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_aborted_before_its_turn_came_is_an_aborted_one(stream: bool) -> None:
    """SGLang then counts no prompt tokens and reports one empty span."""
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    aborted = reply([], finish)
    del aborted["meta_info"]["prompt_tokens"]
    aborted["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": 0}]
    engine = FaultyEngine(events(aborted) if stream else answer(aborted))
    async with engine.client() as client:
        if stream:
            chunks = [chunk async for chunk in client.stream(PROMPT, PARAMS)]
            generation = chunks[-1].final
        else:
            generation = await client.generate(PROMPT, PARAMS)
    assert generation is not None
    assert (generation.finish_reason, len(generation.output_ids)) == ("abort", 0)


async def test_a_score_that_the_engine_breaks_off_is_asked_again() -> None:
    aborted = reply([], {"type": "abort", "message": "Abort in waiting queue"})
    scored = reply([], DONE)
    scored["meta_info"]["input_token_logprobs"] = [[None, 1, None], [-1.0, 2, None]]
    scored["meta_info"]["input_token_logprobs"] += [[-2.0, 3, None]]
    engine = FaultyEngine(answer(aborted), answer(scored))
    async with engine.client() as client:
        assert (await client.score(PROMPT, 1, routing_key="s")).tolist() == [-1.0, -2.0]
    assert engine.routing_keys == ["s", "s"]
    engine = FaultyEngine(answer(aborted))
    async with engine.client() as client:
        with pytest.raises(EngineUnavailable, match="aborted a scoring request"):
            await client.score(PROMPT, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_aborted_while_its_grammar_is_compiled_is_an_aborted_one(
    stream: bool,
) -> None:
    message = "Aborted by AbortReq."
    refused = reply([], {"type": "abort", "message": message, "status_code": 400})
    refused["meta_info"]["prompt_tokens"] = 1
    error = {"error": {"message": message, "code": 400}}
    engine = FaultyEngine(events(refused) if stream else answer(error, status=400))
    async with engine.client() as client:
        if stream:
            [chunk] = [chunk async for chunk in client.stream(PROMPT, PARAMS)]
            generation = chunk.final
        else:
            generation = await client.generate(PROMPT, PARAMS)
    assert generation is not None
    assert (generation.finish_reason, generation.output_ids.tolist()) == ("abort", [])
    assert (generation.weight_version, generation.prompt_tokens) == (None, len(PROMPT))
