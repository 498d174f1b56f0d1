"""Whether a server that the run did not start will do as its engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.processes.remote_engine import absolute, at_temperature, check_engine
from opd.processes.supervisor import free_ports
from opd.run.config import RunConfig, build
from rollout_bridge.engine.client import EngineClient
from tests.contract import tiny_model
from tests.contract.engine_process import embedded_engine
from tests.rollout_bridge.faulty_server import ROUTER_WITHOUT_WORKERS, faulty_server
from trainer.errors import ConfigError
from trainer.model.model_config import model_vocab_size

CONTEXT = 512
SGLANG = {"version": "0.5.23", "enable_return_routed_experts": False, "disaggregation_mode": "null"}
MODEL = {"model_path": "m", "weight_version": "default", "context_length": CONTEXT}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("models") / "start", 0, context_length=CONTEXT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[str]:
    """An engine that serves other weights than the run's, as version 7."""
    other = tiny_model.build(tmp_path_factory.mktemp("models") / "other", 1, context_length=CONTEXT)
    with embedded_engine(other, "--weight-version", "7") as url:
        yield url


def config(model: Path, url: str, **sections: Any) -> RunConfig:
    return build(
        {
            "model": str(model),
            "store": {"url": "sqlite:///records.db"},
            "policy": {"url": url},
            "frozen": {"url": url},
            "judge": {
                "base_url": f"{url}/v1",
                "model": "m",
                "max_tokens": 64,
                "max_prompt_tokens": 448,
            },
            "scoring": {"context_length": CONTEXT},
            "engine_client": {"attempts": 2, "retry_wait_s": 0.01, "probe_timeout_s": 2},
        }
        | sections
        # One server for both: its base may not change.
        | {"trainer": {"lora": {}, "publish": "adapter", **sections.get("trainer", {})}}
    )


async def refusal(role: Any, config: RunConfig, vocab_size: int = 768) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        await check_engine(role, config, vocab_size)
    return str(refused.value).splitlines()


async def test_a_policy_engine_is_made_to_serve_the_start_weights(
    engine: str, model: Path, monkeypatch
) -> None:
    # A relative path means another folder to a server that runs elsewhere.
    monkeypatch.chdir(model.parent)
    settings = config(Path(model.name), engine)
    vocab_size = model_vocab_size(str(model))
    async with EngineClient(engine, vocab_size=vocab_size) as client:
        ids = [3, 4, 5, 6]
        before = await client.score(ids, 1)
        # An earlier run that was killed may leave it so.
        await client.pause()
        assert await check_engine("policy", settings, vocab_size) == []
        info = await client.model_info()
        assert (info.model_path, info.weight_version) == (str(model), "0")
        assert np.abs(await client.score(ids, 1) - before).max() > 0.1


async def test_a_frozen_engine_keeps_what_it_serves(engine: str, model: Path) -> None:
    vocab_size = model_vocab_size(str(model))
    async with EngineClient(engine, vocab_size=vocab_size) as client:
        before = await client.model_info()
        assert await check_engine("frozen", config(model, engine), vocab_size) == []
        assert await client.model_info() == before


async def test_start_weights_that_the_server_cannot_read_are_named(
    engine: str, model: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    vocab_size = model_vocab_size(str(model))
    (line,) = await refusal("policy", config(gone, engine), vocab_size)
    assert line.startswith(f"policy.url: {engine}: it cannot load the start weights from {gone}")
    assert "same paths" in line


async def test_another_vocabulary_is_refused(engine: str, model: Path) -> None:
    vocab_size = model_vocab_size(str(model))
    (line,) = await refusal("frozen", config(model, engine), vocab_size + 1)
    assert f"with {vocab_size} token ids, and the run's model has {vocab_size + 1}" in line


async def test_a_context_that_is_too_short_is_refused_with_what_to_set(
    engine: str, model: Path
) -> None:
    vocab_size = model_vocab_size(str(model))
    settings = config(model, engine, scoring={"context_length": 4096})
    settings = settings.model_copy(
        update={"judge": settings.judge.model_copy(update={"max_prompt_tokens": 4032})}
    )
    scoring, judge = await refusal("frozen", settings, vocab_size)
    assert "set that to 512, or start the server with --context-length 4096" in scoring
    assert "set judge.max_prompt_tokens = 448" in judge
    # The proxy asks the policy's engine itself.
    assert await check_engine("policy", settings, vocab_size) == []


@pytest.mark.parametrize("role", ["policy", "frozen"])
async def test_no_server_is_one_line(model: Path, role: str) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    (line,) = await refusal(role, config(model, url))
    assert line.startswith(f"{role}.url: no engine answers at {url}")
    assert "start it first" in line


@pytest.mark.parametrize("body", ["<html>", {"hello": 1}, [], {"version": "two"}])
async def test_another_kind_of_server_is_one_line(model: Path, body: Any) -> None:
    async with faulty_server({"/server_info": (200, body)}) as server:
        (line,) = await refusal("frozen", config(model, server.url))
    assert line.startswith(f"frozen.url: what answers at {server.url} is not an engine")


async def test_a_router_takes_no_weights_and_needs_a_worker(model: Path) -> None:
    async with faulty_server(ROUTER_WITHOUT_WORKERS) as server:
        settings = config(model, server.url)
        (line,) = await refusal("policy", settings)
        assert "a router, which does not pass weight updates on" in line
        (line,) = await refusal("frozen", settings)
        assert "a router with no workers" in line
        router = {"router_manager": True, "workers_count": 1}
        server.replies |= {
            "/get_server_info": (200, router),
            "/get_model_info": (200, MODEL),
        }
        assert await check_engine("frozen", settings, 768) == []


async def test_old_servers_and_their_flags_are_named(model: Path) -> None:
    replies: dict[str, tuple[int, Any]] = {
        "/server_info": (200, {**SGLANG, "version": "0.5.2"}),
        "/model_info": (200, MODEL),
    }
    async with faulty_server(replies) as server:
        settings = config(model, server.url)
        (line,) = await refusal("frozen", settings)
        assert "SGLang 0.5.2 is older than 0.5.7" in line
        server.replies["/server_info"] = (200, {**SGLANG, "version": "0.5.15.post1"})
        (line,) = await refusal("policy", settings)
        assert "SGLang 0.5.15 ends if its weights change while requests wait" in line
        assert "set that to abort" in line
        server.replies["/server_info"] = (200, {**SGLANG, "allow_auto_truncate": True})
        (line,) = await refusal("policy", settings)
        assert "--allow-auto-truncate" in line
        server.replies["/server_info"] = (200, SGLANG)
        settings = config(model, server.url, engine_client={"routed_experts_topk": 8})
        (line,) = await refusal("policy", settings)
        assert "--enable-return-routed-experts" in line


LOGITS = np.array([[0.0, 1.0, 3.0], [2.0, -1.0, 0.5], [0.1, 0.0, 0.3]])


def logprobs_at(temperature: float) -> np.ndarray:
    return LOGITS / temperature - np.logaddexp.reduce(LOGITS / temperature, axis=1, keepdims=True)


def test_logprobs_are_moved_to_another_temperature() -> None:
    rows = logprobs_at(1.0)
    moved = at_temperature(rows[:, 1], -np.sort(-rows, axis=1), 0.5)
    np.testing.assert_allclose(moved, logprobs_at(0.5)[:, 1], rtol=1e-6)


@pytest.mark.parametrize("answered_at", [0.5, 1.0])
async def test_logprobs_of_another_temperature_are_refused(model: Path, answered_at: float) -> None:
    prompt, chosen = [0, 1, 2], [1, 0, 2]
    rows = logprobs_at(1.0)
    meta = {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "weight_version": "0",
        "output_token_logprobs": [
            [logprobs_at(answered_at)[i, token], token, None] for i, token in enumerate(chosen)
        ],
        "input_token_logprobs": [[None, prompt[-1], None]]
        + [[rows[i, token], token, None] for i, token in enumerate(chosen)],
        "input_top_logprobs": [None]
        + [[[row[v], int(v), None] for v in np.argsort(-row)] for row in rows],
    }
    replies: dict[str, tuple[int, Any]] = {
        "/server_info": (200, {**SGLANG, "version": "0.5.9"}),
        "/model_info": (200, MODEL),
        "/pause_generation": (200, {}),
        "/continue_generation": (200, {}),
        "/update_weights_from_disk": (200, {"success": True}),
        "/generate": (200, {"text": "", "output_ids": chosen, "meta_info": meta}),
    }
    async with faulty_server(replies) as server:
        settings = config(model, server.url, trainer={"pause_mode": "abort"})
        if answered_at == 0.5:
            (warning,) = await check_engine("policy", settings, 3)
            assert "SGLang 0.5.9 does not report which weights sampled which token" in warning
        else:
            (line,) = await refusal("policy", settings, 3)
            assert "unset SGLANG_RETURN_ORIGINAL_LOGPROB" in line


def test_only_folders_are_made_absolute(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("m") == str(tmp_path / "m")
    assert absolute("org/model") == "org/model"
