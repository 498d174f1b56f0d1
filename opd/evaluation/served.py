"""Engines for an evaluation: its own embedded ones, or one that is already running.

The run's own engines are left alone: they may be serving agents, and the policy's changes its
weights at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from opd.evaluation.weights import VersionWeights
from opd.processes.answering import answers
from opd.processes.remote_engine import Role, absolute
from opd.processes.run import ENGINE_START_S
from opd.processes.supervisor import Supervisor, free_ports
from opd.run.config import EngineConfig, RunConfig
from opd.run.defaults import ENGINE_KEY
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.engine.keys import EngineKeys, ensure_key_file, read_key_file
from rollout_bridge.engine.served import AdapterRef, Chosen, ServedVersion
from trainer.errors import ConfigError, StartupError
from trainer.model.model_config import model_vocab_size

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ADAPTERS = "opd-eval-"


async def load(engine: EngineClient, weights: VersionWeights, run: Path) -> None:
    """Make the engine serve these weights under their label. If the engine takes no adapters, the
    adapter is merged, in the folder of the `run`, which a remote engine sees too. Raises
    EngineError.
    """
    chosen = engine.served
    assert isinstance(chosen, Chosen), "an evaluation's own client"
    chosen.version = None
    if weights.adapts is None:
        if (await engine.model_info()).weight_version != weights.label:
            await _exchange(engine, weights.path, weights.label)
        return
    if (await engine.model_info()).weight_version == "0":
        # Any unused name will do; the engine belongs to this evaluation for now.
        adapter = AdapterRef(name=f"{_ADAPTERS}{uuid.uuid4().hex}", path=weights.path)
        try:
            await engine.load_adapter(adapter.name, adapter.path)
        except EngineRejected as refusal:
            logger.warning("version %s is merged for the engine: %s", weights.label, refusal)
        else:
            chosen.version = ServedVersion(label=weights.label, adapter=adapter)
            return
    from trainer.publishing.merged import write_merged  # imports torch

    with tempfile.TemporaryDirectory(prefix=".eval_weights_", dir=run.resolve()) as folder:
        await asyncio.to_thread(write_merged, weights.adapts, Path(weights.path), Path(folder))
        await _exchange(engine, folder, weights.label)


@asynccontextmanager
async def policy_engine(
    config: RunConfig, config_file: Path, overrides: list[str], url: str | None
) -> AsyncIterator[EngineClient]:
    """An engine whose weights may be changed: started here with the start model as version 0, or
    the one at `url`, which gets its weights back at the end.

    Raises StartupError if it cannot be started, or if `url` is an engine of the run itself;
    EngineError if nothing answers there.
    """
    if url is None:
        async with own_engine("policy", config, config_file, overrides) as engine:
            yield engine
        return
    if url.rstrip("/") in _urls_of_run(config):
        raise StartupError(
            f"--engine-url {url}: that is an engine of the run itself, and an evaluation changes "
            "weights; give a spare one, or omit the option to start one"
        )
    given = config.policy
    keys = EngineConfig(url=url, api_key=given.api_key, admin_api_key=given.admin_api_key).keys
    async with _client(config, url, keys) as engine:
        before = await engine.model_info()
        # Its label may be a version's by chance, but with another run's weights.
        await _exchange(engine, absolute(config.model), "0")
        try:
            yield engine
        finally:
            await _forget_adapters(engine)
            await _exchange(engine, before.model_path, before.weight_version)


@asynccontextmanager
async def frozen_engine(
    config: RunConfig, config_file: Path, overrides: list[str]
) -> AsyncIterator[EngineClient]:
    """The teacher: the run's own if it is a server that the run did not start, else one started
    here with the start model.
    """
    if config.frozen.url is not None:
        async with _client(config, config.frozen.url, config.frozen.keys) as engine:
            yield engine
        return
    async with own_engine("frozen", config, config_file, overrides) as engine:
        yield engine


@asynccontextmanager
async def own_engine(
    role: Role, config: RunConfig, config_file: Path, overrides: list[str]
) -> AsyncIterator[EngineClient]:
    """An embedded engine with this role's settings, as a process that ends with this context."""
    (port,) = free_ports(1, _HOST)
    key_file = config_file.parent.resolve() / ENGINE_KEY
    ensure_key_file(key_file)
    settings = {
        "model": absolute(config.model),
        "host": _HOST,
        "port": port,
        "weight_version": "0",
        "api_key_file": str(key_file),
    }
    arguments = ["-m", "opd.cli.app", "engine", "--role", role, "--run", str(config_file.parent)]
    arguments += [
        "--set",
        "frozen.shared=false",
    ]  # not the run's engine, which is left alone
    for override in [
        *overrides,
        # JSON of text and numbers is TOML too.
        *(f"{role}.embedded.{key}={json.dumps(value)}" for key, value in settings.items()),
    ]:
        arguments += ["--set", override]
    url = f"http://{_HOST}:{port}"
    supervisor = Supervisor(config_file.parent / "logs")
    try:
        await supervisor.start(f"eval_{role}", arguments, answers(f"{url}/health"), ENGINE_START_S)
        keys = EngineKeys(api=read_key_file(key_file))
        async with _client(config, url, keys) as engine:
            yield engine
    finally:
        await supervisor.stop()


async def _forget_adapters(engine: EngineClient) -> None:
    """Unload the adapters that `load` brought to an engine that outlives this evaluation."""
    with contextlib.suppress(EngineRejected):  # one without adapters
        for name in await engine.adapters():
            if name.startswith(_ADAPTERS):
                await engine.unload_adapter(name)


async def _exchange(engine: EngineClient, path: str, label: str) -> None:
    await engine.pause("abort")
    try:
        await engine.update_weights(path, label)
    finally:
        await engine.resume()


def _client(config: RunConfig, url: str, keys: EngineKeys) -> EngineClient:
    vocab_size = model_vocab_size(config.model)
    return EngineClient(
        url, config=config.engine_client, vocab_size=vocab_size, keys=keys, served=Chosen()
    )


def _urls_of_run(config: RunConfig) -> set[str]:
    return {
        url.rstrip("/")
        for url in (_base_url(config.policy), _base_url(config.frozen))
        if url is not None
    }


def _base_url(engine: EngineConfig) -> str | None:
    try:
        return engine.base_url
    except ConfigError:  # slime brings its own engines
        return None
