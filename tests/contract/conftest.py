"""The engine under the contract: an embedded one by default, any other by its address.

    pytest tests/contract --engine-url http://127.0.0.1:31000 [--engine-api-key KEY] \
        --engine-model MODEL --engine-other-model OTHER

MODEL is the folder the server was started from and OTHER one of the same architecture with other
weights; the server must be able to read it. Without OTHER, tests of weight updates are skipped.
The server is to compute in float32, and at most 16 requests at once: some tests are of requests
that wait for their turn.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.keys import EngineKeys, ensure_key_file, read_key_file
from tests.contract import tiny_model
from tests.contract.engine_process import embedded_engine


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine contract")
    group.addoption("--engine-url", default=None, help="a running engine to test")
    group.addoption("--engine-api-key", default=None, help="the key that the engine wants")
    group.addoption("--engine-model", default=None, help="the folder it was started from")
    group.addoption("--engine-other-model", default=None, help="other weights, same architecture")


@dataclass(frozen=True)
class Models:
    """Folders of the served model and of other weights for it."""

    served: Path
    other: Path | None


@pytest.fixture(scope="session")
def engine_models(request: pytest.FixtureRequest, tmp_path_factory) -> Models:
    torch.set_num_threads(1)
    served = request.config.getoption("--engine-model", default=None)
    other = request.config.getoption("--engine-other-model", default=None)
    if served is not None:
        # Absolute: the server loads them too, and it runs somewhere else.
        return Models(Path(served).resolve(), Path(other).resolve() if other else None)
    folder = tmp_path_factory.mktemp("models")
    return Models(tiny_model.build(folder / "a", 0), tiny_model.build(folder / "b", 1))


@pytest.fixture(scope="session")
def engine_key(request: pytest.FixtureRequest, tmp_path_factory) -> str | None:
    """The key that the engine wants. The embedded one wants one here, as in a run."""
    if request.config.getoption("--engine-url", default=None) is not None:
        return request.config.getoption("--engine-api-key", default=None)
    ensure_key_file(path := tmp_path_factory.getbasetemp() / "engine.key")
    return read_key_file(path)


@pytest.fixture(scope="session")
def engine_url(
    request: pytest.FixtureRequest, engine_models: Models, engine_key: str | None, tmp_path_factory
) -> Iterator[str]:
    url = request.config.getoption("--engine-url", default=None)
    if url is not None:
        if not request.config.getoption("--engine-model", default=None):
            pytest.fail("--engine-url needs --engine-model, the folder it was started from")
        yield url
        return
    key_file = tmp_path_factory.getbasetemp() / "engine.key"
    assert key_file.read_text().strip() == engine_key
    with embedded_engine(engine_models.served, "--api-key-file", str(key_file)) as url:
        yield url


@pytest.fixture(scope="session")
def tokenizer(engine_models: Models):
    return AutoTokenizer.from_pretrained(engine_models.served)


Reference = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def reference(engine_models: Models) -> Reference:
    """Log-probs [T, V] of the next token after each of T ids, by one plain forward pass."""
    loaded = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in (("served", engine_models.served), ("other", engine_models.other))
        if path is not None
    }

    def logprobs(ids: list[int], *, temperature: float = 1.0, weights: str = "served"):
        with torch.inference_mode():
            logits_TV = loaded[weights](torch.tensor([ids])).logits[0].float()
            return torch.log_softmax(logits_TV / temperature, dim=-1).numpy()

    return logprobs


@pytest.fixture(scope="session")
def vocab_size(engine_models: Models, reference: Reference) -> int:
    return reference([0]).shape[-1]


@pytest.fixture
async def client(
    engine_url: str, engine_key: str | None, vocab_size: int
) -> AsyncIterator[EngineClient]:
    config = EngineClientConfig(total_timeout_s=60, first_token_timeout_s=60)
    keys = EngineKeys(api=engine_key)
    async with EngineClient(engine_url, config=config, vocab_size=vocab_size, keys=keys) as client:
        yield client


@pytest.fixture
async def http(engine_url: str, engine_key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """For what the client's reading depends on and hides: the replies themselves."""
    headers = EngineKeys(api=engine_key).headers("/")
    async with httpx.AsyncClient(base_url=engine_url, headers=headers, timeout=60) as http:
        yield http


@pytest.fixture
async def other_weights(client: EngineClient, engine_models: Models) -> AsyncIterator[str]:
    """The folder of the other weights; the served ones are back after the test."""
    if engine_models.other is None:
        pytest.skip("needs --engine-other-model")
    before = (await client.model_info()).weight_version
    yield os.fspath(engine_models.other)
    await updated(client, os.fspath(engine_models.served), before)


async def updated(client: EngineClient, path: str, version: str) -> None:
    """As the product does it: with requests on its hands, an engine cannot forget its cache."""
    await client.pause("retract")
    try:
        await client.update_weights(path, version)
    finally:
        await client.resume()
