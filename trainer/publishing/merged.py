"""Full weights of versions whose checkpoints hold an adapter: for export, and for engines that take
no adapters.

    merged/step_000007/   a Hugging Face folder: start weights with the adapter added in

Such a folder is made on request, can be made again, and is deleted when no engine serves it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoints.checkpoint import Checkpoints, copy_tokenizer
from trainer.model.frozen_weights import say_float32
from trainer.model.lora import ADAPTER_CONFIG, belongs_to_rounded_base, known_warnings, merged_state
from trainer.model.policy import Policy

FOLDER = "merged"
_TEMPORARY = ".merging_"


class MergedFolders:
    """The merged folders of one run, in `root`."""

    def __init__(self, root: Path, checkpoints: Checkpoints) -> None:
        self.root, self._checkpoints = root, checkpoints

    def folder(self, version: int) -> Path:
        """Where the merged weights of `version` are or would be."""
        return self.root / f"step_{version:06d}"

    def path(self, version: int, policy: Policy | None = None) -> str | None:
        """A folder with all weights of `version`, made if there is none; None where they were
        deleted. A `policy` that has this version saves loading it.
        """
        full = self._checkpoints.full_weights(version)
        if full is not None or not self._checkpoints.has_weights(version):
            return full
        folder = self.folder(version)
        if not folder.exists():
            self.root.mkdir(mode=0o700, exist_ok=True)
            temporary = self.root / f"{_TEMPORARY}{os.getpid()}_{version:06d}"
            shutil.rmtree(temporary, ignore_errors=True)
            if policy is not None:
                save_full(policy, temporary)
                copy_tokenizer(self._checkpoints.model, temporary)
            else:
                write_merged(self._checkpoints.model, self._checkpoints.folder(version), temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        return str(folder.resolve())

    def prune(self, keep: Iterable[int]) -> None:
        """Delete the folders of every version not in `keep`, and half-written ones."""
        kept = {self.folder(version) for version in keep}
        for folder in self.root.glob("step_*"):
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        for leftover in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def save_full(policy: Policy, folder: Path) -> None:
    """All weights as a Hugging Face folder, adapters added in."""
    base: Any = policy.base_model
    if policy.model is base:
        base.save_pretrained(folder)
        return
    # A frozen base in bfloat16 with an adapter in float32 is float32.
    base.save_pretrained(folder, state_dict=merged_state(base))
    say_float32(folder)


def write_merged(model: str, adapter: Path, folder: Path) -> None:
    """The start `model` with the adapter in a checkpoint added in, and its tokenizer, in float32
    as the trainer has them.
    """
    base = merged_model(model, adapter)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    base.save_pretrained(folder)
    copy_tokenizer(model, folder)


def merged_model(model: str, adapter: Path) -> Any:
    """A plain transformers model: the start `model` with the adapter in the folder added in."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    assert (adapter / ADAPTER_CONFIG).is_file()
    transformers_logging.disable_progress_bar()
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if belongs_to_rounded_base(adapter):
        for tensor in start.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    with known_warnings():
        adapted: Any = PeftModel.from_pretrained(start, str(adapter))
    state = merged_state(adapted.get_base_model())
    plain: Any = adapted.unload()
    plain.load_state_dict(state)
    return plain
