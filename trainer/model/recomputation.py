"""Gradient checkpointing: a decoder layer keeps only its input, and is computed again backward.

transformers' own switch works only in training mode, in which dropout, which the trainer does not
use, would act as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.model.token_states import BehindPrefix


def recompute_layers(decoder: nn.Module) -> int:
    """Let every layer of `decoder` be computed again for its gradients; returns the number of
    layers.

    Without gradients nothing changes. What a layer computes must be the same in the backward pass:
    adapters may not be switched between the two. Keys and values that it adds to a cache are its
    results, like its states.
    """
    layers = [one for one in decoder.modules() if isinstance(one, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
    return len(layers)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        cache = kwargs.get("past_key_values")
        if cache is None or isinstance(cache, BehindPrefix):
            return _checkpoint(forward, *args, **kwargs)
        result, added = _checkpoint(_with_cache, forward, *args, **kwargs)
        for layer, (keys, values) in added.items():
            cache.update(keys, values, layer)
        return result

    return run


class _Added(DynamicCache):
    """An empty cache that records what a layer adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """The same keys and values."""
        self.added[layer_idx] = key_states, value_states
        return key_states, value_states


def _with_cache(
    forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, dict[int, tuple[Tensor, Tensor]]]:
    """What a layer computes, and what it adds to an empty cache."""
    cache = _Added()
    return forward(*args, **{**kwargs, "past_key_values": cache}), cache.added


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # There is no dropout, so no random state has to be the same.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
