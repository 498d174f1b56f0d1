"""Gradient checkpointing: a decoder layer keeps its input alone, and is computed again backward.

transformers' own switch acts in training mode only, in which the dropout that the trainer leaves
out would act as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(decoder: nn.Module) -> int:
    """Let every layer of `decoder` be computed again for its gradients; the number of layers.

    Without gradients nothing changes. What a layer computes must be the same in the backward pass:
    adapters may not be switched between the two.
    """
    layers = [one for one in decoder.modules() if isinstance(one, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # There is no dropout: no random state has to be the same.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
