"""Bringing a new adapter to the engines: load it next to the others, then let requests name it.

Nothing pauses. A request that has begun ends on the adapter that it named, and the one before the
newest stays loaded; what is older is unloaded, which engines do once no request uses it. When all
engines have the new one, one file of the run folder says so (`rollout_bridge.engine.served`), and
every process's next request names it. A version that must be checked first is staged: it is loaded
as well, but another file names it, which only the guard reads.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from records.database import fail_points
from rollout_bridge.engine.errors import EngineError, EngineRejected
from rollout_bridge.engine.served import AdapterRef, ServedFile, ServedVersion
from trainer.checkpoints.manifest import Manifest
from trainer.model.lora import save_adapter
from trainer.model.policy import Policy
from trainer.publishing.exchange import WeightHolder, exchange_weights
from trainer.publishing.publish import PublishedWeights

logger = logging.getLogger(__name__)

_PROBE = "opd-probe-"
_OURS = re.compile(rf"opd-v\d{{6,}}-[0-9a-f]{{12}}|{_PROBE}[0-9a-f]+")
_BASE_LABELS = ("0", "default")
"""Version labels of an engine with its start weights: a run's own, and SGLang's default."""


def adapter_name(manifest: Manifest) -> str:
    """The name of a version's adapter: the same for these weights in any run."""
    return f"opd-v{manifest.version:06d}-{manifest.hash[:12]}"


class AdapterEngine(WeightHolder, Protocol):
    """The part of the engine client that publication of adapters uses."""

    async def load_adapter(self, name: str, path: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def adapters(self) -> list[str]: ...
    async def base_info(self) -> Any: ...


async def why_not_adapters(
    engines: Mapping[str, AdapterEngine], policy: Policy, base: str, folder: Path
) -> str | None:
    """Why these engines cannot serve the policy's adapter next to the `base`; None if all can.

    They load one of its shape, from the run's `folder`, and unload it again. Raises
    EngineUnavailable if one does not answer.
    """
    name = f"{_PROBE}{uuid.uuid4().hex}"
    path = folder / f".{name}"
    path.mkdir(mode=0o700)
    try:
        save_adapter(policy.model, path, base)
        for engine_name, engine in engines.items():
            try:
                await engine.load_adapter(name, str(path.resolve()))
                await engine.unload_adapter(name)
            except EngineRejected as refusal:
                return f"engine {engine_name} says: {' '.join(refusal.message.split())}"
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return None


class AdapterPublisher:
    """Keeps the served adapter loaded in every engine and named in the run's `file`, and the staged
    one, if there is one, in `staging`. `base`: the model that the adapters belong to.
    """

    def __init__(
        self,
        engines: Mapping[str, AdapterEngine],
        file: ServedFile,
        staging: ServedFile,
        base: str,
        *,
        attempts: int = 3,
        backoff_s: float = 0.5,
    ) -> None:
        self._engines, self._base = engines, base
        self._file, self._staging = file, staging
        self._attempts, self._backoff_s = attempts, backoff_s
        self._met: set[str] = set()
        self._previous: str | None = None
        self._current: str | None = None
        self._staged: str | None = None
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self.served: dict[str, int | None] = dict.fromkeys(engines)
        """Version that requests to each engine name; None before the first confirmation."""

    async def publish(self, weights: PublishedWeights) -> list[str]:
        """Have all engines serve `weights`. Returns the names that failed; while there are any,
        requests name the previous adapter.
        """
        return await self._bring(weights, self._attempts)

    async def repair(self, weights: PublishedWeights) -> list[str]:
        """The same with one attempt per engine: for those that came back without it."""
        return await self._bring(weights, 1)

    async def stage(self, weights: PublishedWeights) -> None:
        """Have all engines load an adapter that nobody but the guard names; tried again by the next
        call where one fails.
        """
        # First, so that nothing unloads it.
        self._staged = weights.adapter
        if not await self._load_all(weights, self._attempts):
            fail_points.reach("publish.staged")
            self._name(weights, self._staging)

    def unstage(self) -> None:
        """The guard asks what serves from here on; what was staged is unloaded like older ones."""
        # Also what an earlier trainer left; until then the guard goes on with its check.
        self._staging.remove()
        if self._staged is None:
            return
        self._staged = None
        for name in self._engines:
            self._unload_old(name)

    @property
    def has_staged(self) -> bool:
        """Whether a version is staged."""
        return self._staged is not None

    async def close(self) -> None:
        """Stop unloading: the next trainer goes on with it."""
        for task in self._unloading.values():
            task.cancel()
        await asyncio.gather(*self._unloading.values(), return_exceptions=True)

    async def _bring(self, weights: PublishedWeights, attempts: int) -> list[str]:
        failed = await self._load_all(weights, attempts)
        if failed:
            return failed
        fail_points.reach("publish.loaded")
        self._switch(weights)
        for name in self._engines:
            self.served[name] = weights.version
            self._unload_old(name)
        return []

    async def _load_all(self, weights: PublishedWeights, attempts: int) -> list[str]:
        """Returns the engines that do not have it."""
        names = list(self._engines)
        done = await asyncio.gather(*(self._load(name, weights, attempts) for name in names))
        failed = [name for name, success in zip(names, done, strict=True) if not success]
        for name in failed:
            logger.warning("engine %s does not have version %d yet", name, weights.version)
        return failed

    def _switch(self, weights: PublishedWeights) -> None:
        """From now on requests name it."""
        self._name(weights, self._file)
        if weights.adapter != self._current:
            self._previous, self._current = self._current, weights.adapter

    def _name(self, weights: PublishedWeights, file: ServedFile) -> None:
        """Write the version to the file, if it says something else."""
        adapter = None
        if weights.adapter is not None:
            adapter = AdapterRef(name=weights.adapter, path=weights.path)
        version = ServedVersion(label=str(weights.version), adapter=adapter)
        try:
            if file.current() == version:
                return
        except EngineError as error:
            logger.warning("%s", error)
        file.write(version)

    async def _load(self, name: str, weights: PublishedWeights, attempts: int) -> bool:
        engine = self._engines[name]
        for attempt in range(attempts):
            try:
                if name not in self._met:
                    await self._meet(engine)
                    self._met.add(name)
                if weights.adapter is not None and weights.adapter not in await engine.adapters():
                    await engine.load_adapter(weights.adapter, weights.path)
            except EngineError as error:
                # It may be another process when it answers again.
                self._met.discard(name)
                logger.warning(
                    "engine %s: loading the adapter of version %d failed (%d of %d): %s",
                    *(name, weights.version, attempt + 1, attempts, error),
                )
                if attempt + 1 < attempts:
                    await asyncio.sleep(self._backoff_s * 2**attempt)
            else:
                return True
        return False

    async def _meet(self, engine: AdapterEngine) -> None:
        """An earlier trainer may have left it paused, or with merged weights in place of the
        base's.
        """
        label = (await engine.base_info()).weight_version
        if label not in _BASE_LABELS:
            await exchange_weights(engine, self._base, 0, mode="retract")
        else:
            await engine.resume()

    def _unload_old(self, name: str) -> None:
        """Have an engine unload all but the served adapter, the one before and the staged one; in
        the background, as it may wait for requests that take minutes.
        """
        running = self._unloading.get(name)
        if running is None or running.done():
            self._unloading[name] = asyncio.create_task(self._unload(name))

    async def _unload(self, name: str) -> None:
        engine = self._engines[name]
        try:
            for adapter in await engine.adapters():
                kept = {self._current, self._previous, self._staged}
                if adapter not in kept and _OURS.fullmatch(adapter):
                    await engine.unload_adapter(adapter)
        except EngineError as error:
            logger.warning("engine %s keeps an older adapter for now: %s", name, error)
