"""How a run's versions reach its engines: as adapters next to the base, or as full weights.

Decided once, when the trainer starts, by having the engines load an adapter of the run's shape; if
a run with adapters publishes full weights after all, one log line says why, and every step's
metrics count it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout_bridge.engine.served import STAGED_FILE, ServedFile
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.config import TrainerConfig
from trainer.errors import StartupError
from trainer.model.lora import ADAPTER_CONFIG, save_older_as_adapter
from trainer.model.policy import Policy
from trainer.publishing.adapter_publish import (
    AdapterEngine,
    AdapterPublisher,
    adapter_name,
    why_not_adapters,
)
from trainer.publishing.merged import FOLDER as MERGED
from trainer.publishing.merged import MergedFolders
from trainer.publishing.publish import PublishedWeights, Publisher, WeightTarget

logger = logging.getLogger(__name__)

CONVERTED = "adapters"
"""Folder of the run for adapters of checkpoints that earlier releases wrote."""


class PublishingEngine(WeightTarget, AdapterEngine, Protocol):
    """An engine that takes weights either way."""


class EngineWeights(Protocol):
    """What an engine loads to serve a version."""

    def of(self, version: int, policy: Policy | None) -> PublishedWeights:
        """Of a version whose weights are kept; `policy` has them, or is None."""
        ...

    def prune(self, keep: Iterable[int]) -> None:
        """Delete what was made for other versions than these."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """`is_fallback`: a run with adapters has to publish full weights."""

    publisher: Publisher | AdapterPublisher
    weights: EngineWeights
    is_fallback: bool = False


class FullWeights:
    """All weights: a checkpoint's own, or merged from its adapter."""

    def __init__(self, merged: MergedFolders) -> None:
        self._merged = merged

    def of(self, version: int, policy: Policy | None) -> PublishedWeights:
        """Merges if needed."""
        path = self._merged.path(version, policy)
        assert path is not None, "only what is kept is served"
        return PublishedWeights(version=version, path=path)

    def prune(self, keep: Iterable[int]) -> None:
        """Of merged folders."""
        self._merged.prune(keep)


class AdapterFolders:
    """The adapter of each version, where its checkpoint has it."""

    def __init__(self, root: Path, checkpoints: Checkpoints, policy: Policy) -> None:
        self._root, self._checkpoints, self._policy = root, checkpoints, policy

    def of(self, version: int, policy: Policy | None) -> PublishedWeights:
        """Version 0 is the base."""
        if version == 0:
            return PublishedWeights(version=0, path=self._checkpoints.model)
        folder = self._checkpoints.folder(version)
        name = adapter_name(Manifest.read(folder))
        if not (folder / ADAPTER_CONFIG).exists():
            folder = self._converted(version, folder)
        return PublishedWeights(version=version, path=str(folder.resolve()), adapter=name)

    def prune(self, keep: Iterable[int]) -> None:
        """Of converted folders."""
        kept = {f"step_{version:06d}" for version in keep}
        for folder in self._root.glob("step_*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _converted(self, version: int, checkpoint: Path) -> Path:
        folder = self._root / f"step_{version:06d}"
        if not (folder / ADAPTER_CONFIG).exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_older_as_adapter(self._policy.model, checkpoint, folder, self._checkpoints.model)
        return folder


async def choose_publication(
    config: TrainerConfig,
    engines: Mapping[str, PublishingEngine],
    checkpoints: Checkpoints,
    policy: Policy,
    run_folder: Path,
) -> Publication:
    """Adapters if the run trains them and every engine accepts them, unless `trainer.publish` says
    otherwise.

    Raises StartupError if that says "adapter" and an engine refuses them, EngineUnavailable if one
    does not answer.
    """
    merged = MergedFolders(run_folder / MERGED, checkpoints)
    full, file = FullWeights(merged), ServedFile(run_folder)
    staging = ServedFile(run_folder, STAGED_FILE)
    # A file that a power cut left there may have its name but not all of its content.
    merged.prune(())
    problem = None
    if config.lora is not None and config.publish != "merged":
        problem = await why_not_adapters(engines, policy, checkpoints.model, run_folder)
        if problem is None:
            publisher = AdapterPublisher(
                engines,
                file,
                staging,
                checkpoints.model,
                attempts=config.publish_attempts,
                backoff_s=config.publish_backoff_s,
            )
            logger.info("adapters are published as they are, next to their base")
            folders = AdapterFolders(run_folder / CONVERTED, checkpoints, policy)
            folders.prune(())
            return Publication(publisher=publisher, weights=folders)
        if config.publish == "adapter":
            raise StartupError(
                f"trainer.publish: adapters cannot be served next to their base ({problem}): set "
                "trainer.publish=merged, with frozen.shared=false where the run starts its engines"
            )
    file.remove()
    staging.remove()
    if config.lora is not None:
        why = problem or "trainer.publish=merged"
        logger.warning("adapters are merged for the engines at each step: %s", why)
    return Publication(
        publisher=Publisher(
            engines,
            mode=config.pause_mode,
            attempts=config.publish_attempts,
            backoff_s=config.publish_backoff_s,
        ),
        weights=full,
        is_fallback=problem is not None,
    )
