"""What a model's own `config.json` says, read without transformers.

transformers imports torch, which takes 150 MB and seconds, but the endpoint, the judge and the
command that starts them need two numbers and a name. A value that the file leaves to its class's
defaults comes from transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from rollout_bridge.embedded.model.supported import (
    SMALL_BELOW,
    context_limit,
    unsupported,
    unsupported_as_stated,
)
from trainer.config import HeldDtype, TrainerConfig
from trainer.errors import ConfigError

_FILE, _TEXT_PART = "config.json", "text_config"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def config_value(model: str, key: str) -> Any:
    """`key` of a model, a local folder or a hub id; from its text part if it has several parts;
    None if the model does not have it.

    Raises OSError or ValueError for a model that cannot be read.
    """
    stated = stated_values(model)
    for part in (stated, stated.get(_TEXT_PART)):
        if isinstance(part, dict) and part.get(key) is not None:
            return part[key]
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    value = getattr(config, key, None)
    return getattr(getattr(config, _TEXT_PART, None), key, None) if value is None else value


def why_not_served(model: str) -> str | None:
    """Why embedded engines cannot serve a model; None if they can. Raises as `config_value`."""
    stated = stated_values(model)
    if (reason := unsupported_as_stated(stated)) is not None:
        return reason
    if stated.get("layer_types"):
        return None
    from transformers import AutoConfig

    return unsupported(AutoConfig.from_pretrained(model))


def has_experts(model: str) -> bool:
    """Whether its file says that layers are mixtures of experts. Raises as `config_value`."""
    stated = stated_values(model)
    parts = [part for part in (stated, stated.get(_TEXT_PART)) if isinstance(part, dict)]
    return any(part.get(key) for part in parts for key in _EXPERTS)


def context_length(model: str, *, is_served_here: bool) -> int | None:
    """Most tokens of a text, None if the model does not state it; for embedded engines, as many as
    they compute correctly. Raises as `config_value`.
    """
    length = config_value(model, "max_position_embeddings")
    if not isinstance(length, int) or not is_served_here:
        return length
    stated = stated_values(model)
    limit = context_limit({**stated, **(stated.get(_TEXT_PART) or {})})
    return length if limit is None else min(length, limit)


def model_vocab_size(model: str) -> int:
    """Rows of the model's head. Often more than its tokenizer has ids: a policy can sample those
    too, and later prompts then contain them. Raises ConfigError for a model that does not state it.
    """
    size = config_value(model, "vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"model: '{model}' does not say its vocabulary size; is it a causal LM?")
    return size


def held_dtype(model: str, wanted: Literal["auto"] | HeldDtype) -> HeldDtype:
    """Precision of a model's frozen weights (`trainer.base_dtype`). Raises as `config_value`."""
    if wanted != "auto":
        return wanted
    stated = config_value(model, "dtype") or config_value(model, "torch_dtype")
    return "bfloat16" if str(stated).removeprefix("torch.") == "bfloat16" else "float32"


def stated_values(model: str) -> dict[str, Any]:
    """What a model's `config.json` says, without its class's defaults; empty if there is no such
    file.

    Raises OSError or ValueError for a model that cannot be read.
    """
    folder = Path(model)
    file = folder / _FILE if folder.is_dir() else _of_the_hub(model)
    if not file.is_file():
        return {}
    values = json.loads(file.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}


def _of_the_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(model, _FILE))
    except HFValidationError as error:
        raise ValueError(str(error)) from None


def recomputes(config: TrainerConfig, hidden_size: int | None) -> bool:
    """Whether layers are computed again for their gradients: as configured; if unset, unless the
    model is small.
    """
    if config.gradient_checkpointing is not None:
        return config.gradient_checkpointing
    return hidden_size is None or hidden_size >= SMALL_BELOW
