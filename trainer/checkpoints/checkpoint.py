"""Checkpoints on disk: written whole or not at all, verified, loaded, pruned.

    checkpoints/step_000000/   tokenizer files and the manifest of the start weights
    checkpoints/step_000007/   weights, optimizer.pt, rng.pt, tokenizer files and manifest.json

Weights are a Hugging Face folder, or, in a run that trains adapters, only the adapter as peft's
folder. Earlier releases wrote merged weights and `adapter.pt` there, which can still be read. A
checkpoint exists once its folder has its final name: everything in it was synced before. Old ones
lose their weights but keep their manifest, which the chain needs. It knows no store and no engines.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from records.database import fail_points
from trainer.checkpoints import manifest as manifests
from trainer.checkpoints.hashed_files import HashedFiles, sha256, sync
from trainer.checkpoints.manifest import FileEntry, Manifest, chain_to
from trainer.errors import CheckpointError
from trainer.model.lora import (
    ADAPTER_CONFIG,
    OLDER_ADAPTER,
    load_adapter,
    load_older_state,
    save_adapter,
)
from trainer.model.policy import Policy
from trainer.model.teacher_models import EmaTeacher

logger = logging.getLogger(__name__)

_OPTIMIZER, _RNG = "optimizer.pt", "rng.pt"
_CONFIG = "config.json"
_AVERAGE = "teacher_average.pt"
_TEMPORARY = ".writing_"
# What a model folder contains besides tokenizer files; everything else is copied from the start
# model.
_MODEL_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".md")
_MODEL_FILES = frozenset(
    {
        _CONFIG,
        ADAPTER_CONFIG,
        "generation_config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        manifests.FILE_NAME,
    }
)


class Checkpoints:
    """The checkpoints of one run, in `root`; `model` is the start model's folder or hub id."""

    def __init__(self, root: Path, model: str, seed: int):
        self.root = root
        self.model = _identity(model)
        self.seed = seed
        self._pruned: set[str] = set()

    def folder(self, version: int) -> Path:
        """Where the checkpoint of `version` is or would be."""
        return self.root / f"step_{version:06d}"

    def weights_path(self, manifest: Manifest) -> str:
        """The folder with all weights of this version.

        Raises CheckpointError where its checkpoint has an adapter only.
        """
        path = self.full_weights(manifest.version)
        if path is None:
            raise CheckpointError(
                f"{self.folder(manifest.version)} has no full weights: the run trains adapters "
                "(trainer.lora)"
            )
        return path

    def full_weights(self, version: int) -> str | None:
        """The folder with all weights of a version; None where they were deleted, or where its
        checkpoint has an adapter only.
        """
        if version == 0:
            return self.model
        folder = self.folder(version)
        is_full = self.has_weights(version) and (folder / _CONFIG).is_file()
        return str(folder.resolve()) if is_full else None

    def has_weights(self, version: int) -> bool:
        """Whether a version's weights, or its adapter, are still there: those of old ones were
        deleted.
        """
        return version == 0 or any(self.folder(version).glob("*.safetensors"))

    def name(self, manifest: Manifest) -> str:
        """What the store records: relative to the run folder, so that the folder can move."""
        if manifest.version == 0:
            return self.model
        return f"{self.root.name}/{self.folder(manifest.version).name}"

    def open(self) -> list[Manifest]:
        """The chain from version 0 to the newest intact checkpoint that a run can resume from;
        creates version 0 if needed.

        Removes half-written folders. Raises CheckpointError for a run with another start model.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        if not self.folder(0).exists():
            self._write_root()
        root = Manifest.read(self.folder(0))
        if root.model != self.model:
            raise CheckpointError(f"{self.root} belongs to a run that started from {root.model}")
        known = self._readable_manifests()
        for version in sorted(known, reverse=True):
            if not can_go_on_from(known[version]):
                logger.info("version %d has no optimiser state: going further back", version)
                continue
            try:
                chain = chain_to(known[version], known)
                self.verify(known[version])
            except CheckpointError as error:
                logger.warning("checkpoint of version %d is skipped: %s", version, error)
                continue
            return chain
        raise CheckpointError(f"{self.root}: not even the start is intact")

    def highest_version(self) -> int:
        """The largest version number of any folder here, intact or not."""
        return max(int(path.name.removeprefix("step_")) for path in self.root.glob("step_*"))

    def verify(self, manifest: Manifest) -> None:
        """Raises CheckpointError unless every file is there, unchanged."""
        for name, entry in manifest.files.items():
            path = self.folder(manifest.version) / name
            if not path.is_file() or path.stat().st_size != entry.size:
                raise CheckpointError(f"{path} is missing or truncated")
            if sha256(path) != entry.sha256:
                raise CheckpointError(f"{path} has changed")

    def write(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        *,
        parent: Manifest,
        version: int,
        turn_ids: Sequence[str],
        staleness: Sequence[int],
        lesson_ids: Sequence[str] = (),
        lesson_staleness: Sequence[int] = (),
        times: Sequence[int] = (),
        average: EmaTeacher | None = None,
        with_optimizer: bool = True,
    ) -> Manifest:
        """Write and sync the checkpoint of `version`; it exists when this returns, or not at all.

        Without the optimiser's state it can be served, but no run can resume from it.

        Raises CheckpointError if the version has a folder already.
        """
        if self.folder(version).exists():
            raise CheckpointError(
                f"{self.folder(version)} exists; version numbers are never reused"
            )
        temporary = self.root / f"{_TEMPORARY}{version:06d}"
        temporary.mkdir(mode=0o700)
        with HashedFiles(temporary) as hashed:
            self._save_weights(policy, temporary)
            hashed.take(temporary.iterdir())
            if with_optimizer:
                hashed.save(optimizer.state_dict(), _OPTIMIZER)
                hashed.save(_rng_state(), _RNG)
                if average is not None:
                    hashed.save(average.state(), _AVERAGE)
            files = hashed.entries()
        files |= self._link_tokenizer(temporary)
        manifest = Manifest(
            version=version,
            parent_version=parent.version,
            parent_hash=parent.hash,
            step=parent.step + 1,
            turn_ids=tuple(turn_ids),
            staleness=tuple(staleness),
            lesson_ids=tuple(lesson_ids),
            lesson_staleness=tuple(lesson_staleness),
            model=self.model,
            seed=self.seed,
            created_at=time.time(),
            files=files,
            times=tuple(times) if any(time > 1 for time in times) else (),
        )
        self._finish(temporary, manifest)
        return manifest

    def roll_back(self, version: int, *, parent: Manifest, new_version: int) -> Manifest:
        """Write `new_version`, a link after `parent` with the weights and optimiser of `version`.

        Raises CheckpointError if `version` is not an ancestor that a run can resume from, or its
        files are gone or damaged.
        """
        if self.folder(new_version).exists():
            raise CheckpointError(
                f"{self.folder(new_version)} exists; version numbers are never reused"
            )
        source = self.source_of(version, chain_to(parent, self._readable_manifests()))
        self.verify(source)
        temporary = self.root / f"{_TEMPORARY}{new_version:06d}"
        temporary.mkdir(mode=0o700)
        for name in source.files:
            _link(self.folder(version) / name, temporary / name)
        manifest = Manifest(
            version=new_version,
            parent_version=parent.version,
            parent_hash=parent.hash,
            step=parent.step,
            turn_ids=(),
            staleness=(),
            model=self.model,
            seed=self.seed,
            created_at=time.time(),
            files=source.files,
            restores=version,
        )
        self._finish(temporary, manifest)
        return manifest

    def source_of(self, version: int, chain: Sequence[Manifest]) -> Manifest:
        """The link of `chain` that a rollback to `version` copies. Raises CheckpointError where it
        cannot.
        """
        there = [
            link for link in chain[1:] if self.has_weights(link.version) and can_go_on_from(link)
        ]
        for link in there:
            if link.version == version:
                return link
        names = ", ".join(str(link.version) for link in there) or "none"
        raise CheckpointError(
            f"version {version} cannot be restored: its weights or its optimiser's state are not "
            f"kept; choose one of: {names}"
        )

    def load(
        self,
        manifest: Manifest,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        average: EmaTeacher | None = None,
    ) -> None:
        """Optimiser, random state, adapters and averaged teacher of a checkpoint whose weights
        `policy` has.

        Raises CheckpointError where an averaged teacher is wanted and the checkpoint has none, and
        for an adapter with other settings.
        """
        if manifest.version == 0:
            return
        folder = self.folder(manifest.version)
        device = policy.device
        self.load_adapters(manifest.version, policy)
        optimizer.load_state_dict(
            torch.load(folder / _OPTIMIZER, map_location=device, weights_only=True)
        )
        if average is not None:
            if not (folder / _AVERAGE).exists():
                raise CheckpointError(
                    f"{folder} has no averaged teacher: the run began with another teacher.kind"
                )
            average.load_state(
                torch.load(folder / _AVERAGE, map_location=device, weights_only=True)
            )
        rng = torch.load(folder / _RNG, weights_only=True)
        torch.set_rng_state(rng["torch"])
        if torch.cuda.is_available() and rng["cuda"]:
            torch.cuda.set_rng_state_all(rng["cuda"])

    def load_adapters(self, version: int, policy: Policy) -> None:
        """Put the adapters of a version into `policy`; nothing if its checkpoint has none.

        Raises CheckpointError for an adapter of other settings.
        """
        folder = self.folder(version)
        if (folder / ADAPTER_CONFIG).exists():
            load_adapter(policy.model, folder)
        elif (folder / OLDER_ADAPTER).exists():
            load_older_state(policy.base_model, folder / OLDER_ADAPTER, policy.device)

    def prune(self, keep: Iterable[int]) -> list[int]:
        """Delete the weights of every version not in `keep`; manifests and version 0 stay."""
        kept = {self.folder(version).name for version in (*keep, 0)}
        # The names take one look at the root; only folders that may have weights are opened.
        names = {name for name in os.listdir(self.root) if name.startswith("step_")}
        pruned = []
        for name in sorted(names - kept - self._pruned):
            folder = self.root / name
            files = [path for path in folder.iterdir() if path.name != manifests.FILE_NAME]
            for path in files:
                path.unlink()
            self._pruned.add(name)
            if files:
                pruned.append(int(name.removeprefix("step_")))
        return sorted(pruned)

    def _save_weights(self, policy: Policy, folder: Path) -> None:
        base: Any = policy.base_model
        if policy.model is base:
            base.save_pretrained(folder)
        else:
            save_adapter(policy.model, folder, self.model)

    def _readable_manifests(self) -> dict[int, Manifest]:
        known = {}
        for folder in self.root.glob("step_*"):
            try:
                manifest = Manifest.read(folder)
            except CheckpointError as error:
                logger.warning("%s", error)
                continue
            if self.folder(manifest.version) == folder:
                known[manifest.version] = manifest
        return known

    def _write_root(self) -> None:
        temporary = self.root / f"{_TEMPORARY}{0:06d}"
        temporary.mkdir(mode=0o700)
        copy_tokenizer(self.model, temporary)
        with HashedFiles(temporary) as hashed:
            hashed.take(temporary.iterdir())
            files = hashed.entries()
        manifest = Manifest(
            version=0,
            parent_version=None,
            parent_hash=None,
            step=0,
            turn_ids=(),
            staleness=(),
            model=self.model,
            seed=self.seed,
            created_at=time.time(),
            files=files,
        )
        self._finish(temporary, manifest)

    def _finish(self, temporary: Path, manifest: Manifest) -> None:
        path = temporary / manifests.FILE_NAME
        path.write_bytes(manifest.to_bytes())
        sync(path)
        sync(temporary)
        fail_points.reach("checkpoint.unnamed")
        temporary.rename(self.folder(manifest.version))
        sync(self.root)
        fail_points.reach("checkpoint.named")

    def _link_tokenizer(self, folder: Path) -> dict[str, FileEntry]:
        """The tokenizer files of version 0, by hard link where the file system supports it."""
        files = Manifest.read(self.folder(0)).files
        for name in files:
            _link(self.folder(0) / name, folder / name)
        return files


def can_go_on_from(manifest: Manifest) -> bool:
    """Whether a checkpoint has the optimiser's state, or is the start."""
    return manifest.version == 0 or _OPTIMIZER in manifest.files


def _link(source: Path, target: Path) -> None:
    """A hard link where the file system supports it, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def copy_tokenizer(model: str, folder: Path) -> None:
    """Tokenizer files and chat template of `model`, unchanged where it is a local folder."""
    source = Path(model)
    if not source.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        # Further chat templates get a folder of their own; a checkpoint has only files, and the
        # default template is served, as with a local folder.
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        return
    for path in source.iterdir():
        wanted = path.name not in _MODEL_FILES and path.suffix not in _MODEL_SUFFIXES
        if path.is_file() and wanted and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)


def _identity(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}
