"""Routed experts of an engine's reply: decoded where they are there, None where they are odd."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout_bridge.engine import wire
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.experts import joined_experts, read_experts
from rollout_bridge.engine.types import SamplingParams

LAYERS, TOPK = 3, 2


def experts(num_tokens: int, start: int = 0) -> np.ndarray:
    """int32 [num_tokens - 1, LAYERS, TOPK] with a number of its own in each place."""
    size = (num_tokens - 1) * LAYERS * TOPK
    return np.arange(start, start + size, dtype=np.int32).reshape(-1, LAYERS, TOPK)


def encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize(("start", "dtype"), [(0, np.int16), (-1, np.int16), (40_000, np.int32)])
def test_experts_have_the_shape_of_the_sequence_but_its_last_token(start: int, dtype: Any) -> None:
    found = read_experts(encoded(experts(6, start)), 6, TOPK)
    assert found is not None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, experts(6, start))


@pytest.mark.parametrize(
    ("value", "num_tokens", "topk"),
    [
        (None, 6, TOPK),
        ("", 6, TOPK),
        ([[1, 2]], 6, TOPK),
        ("not base64!", 6, TOPK),
        (base64.b64encode(b"12345").decode(), 6, TOPK),
        (encoded(experts(6)), 7, TOPK),
        (encoded(experts(6)), 6, 4),
        (encoded(experts(6)), 6, 0),
        (encoded(experts(2)), 1, TOPK),
    ],
)
def test_what_is_absent_or_odd_is_none(value: Any, num_tokens: int, topk: int) -> None:
    assert read_experts(value, num_tokens, topk) is None


def test_a_continued_reply_keeps_what_each_token_was_first_computed_with() -> None:
    first, second = experts(5), experts(9, 1000)
    joined = joined_experts(first, second)
    assert joined is not None
    np.testing.assert_array_equal(joined[:4], first)
    np.testing.assert_array_equal(joined[4:], second[4:])


def test_parts_that_do_not_fit_are_not_joined() -> None:
    first, second = experts(5), experts(9)
    assert joined_experts(first, None) is None
    assert joined_experts(None, second) is second
    assert joined_experts(first[:, :1], second) is second


def reply(num_input: int, ids: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": num_input,
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            **meta,
        },
    }


def test_a_reply_carries_its_experts_only_if_their_width_is_known() -> None:
    answer = reply(3, [7, 8], routed_experts=encoded(experts(5)))
    found = wire.read_generation(answer, 3, TOPK).routed_experts
    assert found is not None
    np.testing.assert_array_equal(found, experts(5))
    assert wire.read_generation(answer, 3).routed_experts is None
    assert wire.read_generation(reply(3, [7, 8]), 3, TOPK).routed_experts is None


@pytest.mark.parametrize("topk", [0, TOPK])
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_asks_for_experts_where_it_is_configured(
    topk: int, streamed: bool
) -> None:
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        answer = reply(3, [7, 8], routed_experts=encoded(experts(5)))
        if not streamed:
            return web.json_response(answer)
        text = web.json_response(answer).text
        return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = EngineClientConfig(attempts=1, routed_experts_topk=topk)
    params = SamplingParams(max_new_tokens=2)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with EngineClient(url, config=config) as client:
        if streamed:
            chunks = [chunk async for chunk in client.stream([1, 2, 3], params)]
            generation = chunks[-1].final
        else:
            generation = await client.generate([1, 2, 3], params)
    await runner.cleanup()
    assert generation is not None
    assert bodies[0].get("return_routed_experts", False) is bool(topk)
    if topk:
        np.testing.assert_array_equal(generation.routed_experts, experts(5))
    else:
        assert generation.routed_experts is None
