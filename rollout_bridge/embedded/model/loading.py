"""Loading a causal language model, and exchanging its weights in place.

Refuses at the start, by name, models that the key-value rows of this engine cannot serve. It knows
no requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.embedded.errors import UnsupportedModel, WeightsRejected
from rollout_bridge.embedded.model.products import compute_fast
from rollout_bridge.embedded.model.supported import context_limit, unsupported

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: EmbeddedEngineConfig) -> PreTrainedModel:
    """The model in evaluation mode on its device; raises UnsupportedModel with the reason."""
    # An engine's output is a log file or a pipe.
    transformers_logging.disable_progress_bar()
    device = torch.device(config.device)
    automatic = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = _DTYPES.get(config.dtype, automatic)
    try:
        model_config = AutoConfig.from_pretrained(config.model)
        if (reason := unsupported(model_config)) is not None:
            raise UnsupportedModel(reason)
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"cannot load the model '{config.model}': {error}") from error
    if config.rounds_start:
        _round(model.parameters())
    model = model.to(device).eval()  # type: ignore[arg-type]
    compute_fast(model)
    return model


def load_tokenizer(config: EmbeddedEngineConfig) -> Any:
    """The model's tokenizer; raises UnsupportedModel when there is none."""
    try:
        return AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"cannot load the tokenizer of '{config.model}': {error}") from error


def context_length(model: PreTrainedModel, config: EmbeddedEngineConfig) -> int:
    """Most tokens in one sequence; raises UnsupportedModel if neither model nor configuration gives
    it, or if it is more than can be computed correctly.
    """
    text = model.config.get_text_config()
    made_for = getattr(text, "max_position_embeddings", None)
    limit = context_limit(vars(text))
    length = config.context_length or min(filter(None, (made_for, limit)), default=None)
    if not length:
        raise UnsupportedModel("the model does not state its context length: set context_length")
    if limit is not None and length > limit:
        raise UnsupportedModel(
            f"{model.config.model_type}: beyond {limit} tokens, the meaning of positions changes "
            "with the text's length: set context_length to at most that, or serve it from SGLang"
        )
    return int(length)


def load_weights(model: PreTrainedModel, path: str, rounded_model: str | None = None) -> None:
    """Put the folder's tensors into the live model, all or none. Those of `rounded_model` are
    rounded to bfloat16, as they were at the start.

    Raises WeightsRejected when a file cannot be read, or a tensor is missing, unexpected or of
    another shape.
    """
    tensors = _read_tensors(path)
    targets = dict(model.state_dict())
    shared = _shared_names(targets)
    if set(tensors) - set(targets):
        tensors = _converted_tensors(model, path)
    _check_names(tensors, targets, shared)
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    if rounded_model is not None and Path(path).resolve() == Path(rounded_model).resolve():
        _round(model.parameters())


@torch.no_grad()
def _round(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.copy_(parameter.bfloat16())


def _read_tensors(path: str) -> dict[str, torch.Tensor]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise WeightsRejected(f"no safetensors files in {path}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as reader:
                tensors.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise WeightsRejected(f"cannot read {file.name}: {error}") from error
    return tensors


def _converted_tensors(model: PreTrainedModel, path: str) -> dict[str, torch.Tensor]:
    """For architectures whose tensors have other names on disk than in the running model."""
    try:
        loaded, report = type(model).from_pretrained(  # type: ignore[misc]
            path, dtype=model.dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise WeightsRejected(f"cannot load {path}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = ", ".join(sorted(map(str, report[kind]))[:5])
            raise WeightsRejected(f"{kind.replace('_', ' ')}: {names}")
    return dict(loaded.state_dict())


def _shared_names(targets: dict[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are the same as another (tied embeddings), with that one's name."""
    first: dict[int, str] = {}
    return {
        name: original
        for name, tensor in targets.items()
        if (original := first.setdefault(tensor.data_ptr(), name)) != name
    }


def _check_names(
    tensors: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], shared: dict[str, str]
) -> None:
    covered = set(tensors)
    covered |= {name for name, original in shared.items() if original in covered}
    covered |= {original for name, original in shared.items() if name in covered}
    missing = sorted(set(targets) - covered)
    unexpected = sorted(set(tensors) - set(targets))
    wrong = sorted(
        name for name in tensors if name in targets and tensors[name].shape != targets[name].shape
    )
    for kind, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("of another shape", wrong),
    ):
        if names:
            raise WeightsRejected(f"{len(names)} tensors are {kind}, first {', '.join(names[:5])}")
