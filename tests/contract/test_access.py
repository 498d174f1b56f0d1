"""An engine that was started with a key answers nobody without it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.keys import EngineKeys
from rollout_bridge.engine.types import SamplingParams

GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
ROUTES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/generate", GENERATE),
    ("POST", "/generate", {**GENERATE, "stream": True}),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": []}),
    ("GET", "/v1/models", None),
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("POST", "/pause_generation", {"mode": "retract"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/flush_cache", {}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
]


@pytest.fixture(autouse=True)
def _wants_a_key(engine_key: str | None) -> None:
    if engine_key is None:
        pytest.skip("this engine was started without a key")


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_no_route_answers_without_the_key(
    engine_url: str, engine_key: str, method: str, path: str, body: Any
) -> None:
    wrong = ["", "Bearer", "Bearer x", f"Bearer {engine_key}x", f"Bearer {engine_key[:-1]}"]
    async with httpx.AsyncClient(base_url=engine_url, timeout=30) as http:
        for authorization in [None, *wrong, engine_key, f"Basic {engine_key}"]:
            headers = {} if authorization is None else {"authorization": authorization}
            refused = await http.request(method, path, json=body, headers=headers)
            assert refused.status_code == 401, (path, authorization)
            assert refused.json() == {"error": "Unauthorized"}


async def test_health_answers_without_the_key(engine_url: str) -> None:
    async with httpx.AsyncClient(base_url=engine_url) as http:
        assert (await http.get("/health")).status_code == 200


async def test_a_client_without_the_key_is_told(engine_url: str, client: EngineClient) -> None:
    for keys in (EngineKeys(), EngineKeys(api="another")):
        async with EngineClient(engine_url, keys=keys) as stranger:
            with pytest.raises(EngineRejected, match="Unauthorized") as refused:
                await stranger.generate([1, 2], SamplingParams(max_new_tokens=1))
            assert refused.value.status == 401
            with pytest.raises(EngineRejected):
                await stranger.pause()
    # None of that reached it.
    await client.generate([1, 2], SamplingParams(max_new_tokens=1))
