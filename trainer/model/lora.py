"""Low-rank adapters with peft: adding them, their folders, and full weights that contain them.

A folder is peft's own (`adapter_config.json`, `adapter_model.safetensors`), which peft and engines
load. Where full weights are wanted, they are computed separately (base + product of the adapter),
so that the base weights of the run never change and no rounding adds up over steps.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.config import LoraConfig
from trainer.errors import CheckpointError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OLDER_ADAPTER = "adapter.pt"
"""What earlier releases wrote next to merged weights."""
_NAME = "default"
"""peft's name for a model's only adapter."""
_BASE_DTYPE = "base_dtype"
_ADAPTER_MARK = ".lora_"
_BASE_MARK = ".base_layer"


@contextmanager
def known_warnings() -> Iterator[None]:
    """Suppress warnings that peft gives whenever it adds adapters and that do not apply here."""
    with warnings.catch_warnings():
        # It asks the model for an attribute under its former name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # With experts it asks for two names, of which a family has one.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
        yield


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> nn.Module:
    """`model` frozen, with adapters that change nothing yet; deterministic in `seed`."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    with torch.random.fork_rng(), known_warnings():
        torch.manual_seed(seed)
        wrapped: Any = get_peft_model(
            model,  # type: ignore[arg-type]
            PeftConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=0.0,
                target_modules=config.target_modules,
                task_type="CAUSAL_LM",
            ),
        )
    return wrapped


@torch.no_grad()
def merged_state(base_model: nn.Module) -> dict[str, Tensor]:
    """State dict of the plain model with every adapter added into its layer."""
    from peft.tuners.lora import LoraLayer

    state = {
        name.replace(_BASE_MARK, ""): tensor
        for name, tensor in base_model.state_dict().items()
        if _ADAPTER_MARK not in name
    }
    for name, module in base_model.named_modules():
        if isinstance(module, LoraLayer):
            delta: Any = module.get_delta_weight(_NAME)  # type: ignore[operator]
            # Experts have their weights in one parameter of another name, and two adapters nested.
            key = f"{name.replace(_BASE_MARK, '')}.{getattr(module, 'parameter_name', 'weight')}"
            state[key] = state[key] + delta
    return state


def adapter_state(base_model: nn.Module) -> dict[str, Tensor]:
    """The adapters' own tensors."""
    return {
        name: tensor for name, tensor in base_model.state_dict().items() if _ADAPTER_MARK in name
    }


def save_adapter(model: Any, folder: Path, base: str) -> None:
    """Write the adapters of `model` (peft's) as a folder; `base`: the model that they belong to.
    The file's metadata say whether that was held in bfloat16 (`trainer.base_dtype`).
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    rounded = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    metadata = {"format": "pt", _BASE_DTYPE: "bfloat16" if rounded else "float32"}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata=metadata)
    _save_config(model, folder, base)


def belongs_to_rounded_base(folder: Path) -> bool:
    """Whether the adapter in a folder was trained on its base rounded to bfloat16."""
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        return (file.metadata() or {}).get(_BASE_DTYPE) == "bfloat16"


def save_older_as_adapter(model: Any, checkpoint: Path, folder: Path, base: str) -> None:
    """Write the adapters that an earlier release's checkpoint has next to merged weights as a
    folder like that of `save_adapter`; `model` has adapters of the same settings.
    """
    state = torch.load(checkpoint / OLDER_ADAPTER, map_location="cpu", weights_only=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    _save_config(model, folder, base)


def _save_config(model: Any, folder: Path, base: str) -> None:
    config = copy.copy(model.peft_config[_NAME])
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.target_modules = _short_names(model.get_base_model(), config.target_modules)
    config.save_pretrained(str(folder))


def load_adapter(model: Any, folder: Path) -> None:
    """Load what `save_adapter` wrote into a model with adapters of the same settings.

    Raises CheckpointError, one line, for an adapter with other settings or of another model.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    stored = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config = model.peft_config[_NAME]
    for key, name in (("r", "rank"), ("lora_alpha", "alpha")):
        if stored.get(key) != getattr(config, key):
            raise CheckpointError(
                f"{folder}: its adapter has {name} {stored.get(key)}, but trainer.lora.{name} is "
                f"{getattr(config, key)}: set that back"
            )
    state = load_file(folder / ADAPTER_WEIGHTS)
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = {name for name in own.keys() & state.keys() if own[name].shape != state[name].shape}
    wrong |= own.keys() ^ state.keys()
    if wrong:
        raise CheckpointError(
            f"{folder}: its adapter does not fit this model and trainer.lora.target_modules: "
            f"{len(wrong)} tensors differ, {min(wrong)} first"
        )
    set_peft_model_state_dict(model, state)


def load_older_state(base_model: nn.Module, file: Path, device: torch.device) -> None:
    """Load the file that older checkpoints have next to merged weights. Raises CheckpointError if
    the names differ.
    """
    state = torch.load(file, map_location=device, weights_only=True)
    own = adapter_state(base_model)
    if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
        raise CheckpointError(f"{file}: the adapters are not those of trainer.lora: set that back")
    base_model.load_state_dict(state, strict=False)


def _short_names(base_model: nn.Module, targets: Any) -> Any:
    """`q_proj` in place of every layer's `model.layers.N.self_attn.q_proj`, where that means the
    same modules.
    """
    if not isinstance(targets, set | list):
        return targets
    adapted = {name for name, module in base_model.named_modules() if hasattr(module, "base_layer")}
    short = {name.rpartition(".")[2] for name in adapted}
    inner = ".base_layer"
    meant = {
        name
        for name, _ in base_model.named_modules()
        if name.rpartition(".")[2] in short and not name.endswith(inner)
    }
    return sorted(short) if meant == adapted else sorted(targets)
