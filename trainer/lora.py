"""Low-rank adapters with peft: adding them, and full weights that contain them.

Engines load full weights. They are computed aside (base + product of the adapter), so that the base
weights of the run never change and no rounding adds up over steps.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import LoraConfig

_ADAPTER_MARK = ".lora_"
_BASE_MARK = ".base_layer"


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> nn.Module:
    """`model` frozen, with adapters that change nothing yet; deterministic in `seed`."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        # peft asks the model for an attribute under its former name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # Of experts: peft asks for two names, of which a family has one.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
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
            delta: Any = module.get_delta_weight("default")  # type: ignore[operator]
            # Experts have their weights in one parameter of another name, and two adapters nested.
            key = f"{name.replace(_BASE_MARK, '')}.{getattr(module, 'parameter_name', 'weight')}"
            state[key] = state[key] + delta
    return state


def adapter_state(base_model: nn.Module) -> dict[str, Tensor]:
    """The adapters' own tensors."""
    return {
        name: tensor for name, tensor in base_model.state_dict().items() if _ADAPTER_MARK in name
    }


def load_adapter_state(base_model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put `adapter_state` back. Raises ValueError if the names differ."""
    own = adapter_state(base_model)
    if own.keys() != state.keys():
        raise ValueError("the checkpoint's adapters are not those of this configuration")
    base_model.load_state_dict(state, strict=False)
