"""Weights that never change, held in bfloat16 and computed with in float32.

A matrix is converted to float32 for the one product that needs it, forward and again backward: only
the bfloat16 matrix, which is there anyway, is kept for the backward pass. So the log-probs are
those of a model that holds the same, rounded values in float32. Under autocast its own rules apply.

It knows no adapters. The matrices may be mapped from the file that they were loaded from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Product(torch.autograd.Function):
    """x @ weight.T + bias in the dtype of x; only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.to(gradients[0].dtype), None, None


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is held in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., out], in the dtype of the input."""
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]


class FrozenEmbedding(nn.Embedding):
    """An embedding held in bfloat16; Gemma's kind multiplies by a number."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] rows in float32."""
        return super().forward(input).float() * getattr(self, "scalar_embed_scale", 1.0)


def hold_in_bfloat16(model: nn.Module) -> nn.Module:
    """Freeze `model`, loaded in bfloat16, and let it compute in float32; in place.

    Linear layers and embeddings stay in bfloat16, the rest (norms, biases, the experts of a
    mixture) is held in float32.
    """
    model.requires_grad_(False)
    layers = [module for module in model.modules() if _kind(module) is not None]
    held = {id(module.weight) for module in layers}
    # A tensor that something else uses as well must have the type that it expects.
    held -= {
        id(tensor)
        for module in model.modules()
        for name, tensor in module.named_parameters(recurse=False)
        if module not in layers or name != "weight"
    }
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.data = parameter.data.float()
    for module in layers:
        kind = _kind(module)
        if kind is not None and id(module.weight) in held:
            module.__class__ = kind
    return model


def _kind(module: nn.Module) -> type[FrozenLinear] | type[FrozenEmbedding] | None:
    if type(module) is nn.Linear:
        return FrozenLinear
    if type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale"):
        return FrozenEmbedding
    return None


def say_float32(folder: Path) -> None:
    """Make the configuration of a saved model name the precision to load it in.

    transformers writes that of the first tensor, which may be a frozen one.
    """
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, "dtype": "float32"}, indent=2, sort_keys=True) + "\n")
