"""Rows that begin alike: what they share goes through the model once, and its keys and values serve
all of them. States and gradients are the same as those of each row alone.

Shapes: B rows, T tokens, H hidden size; keys and values are [B, heads, T, head size].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

_LEAST_SAVED = 64
"""Sharing fewer tokens is not worth a second pass through the layers."""


class BehindPrefix(DynamicCache):
    """The cache of a prefix, for the rows that follow it. It keeps nothing of these, so a layer
    that is computed again for its gradients finds it unchanged.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix and of what follows it."""
        layer: Any = self.layers[layer_idx]
        both = ((layer.keys, key_states), (layer.values, value_states))
        keys, values = (
            torch.cat([before.expand(len(behind), -1, -1, -1), behind], dim=-2)
            for before, behind in both
        )
        return keys, values


def shared_length(ids_BT: Tensor, mask_BT: Tensor) -> int:
    """Leading tokens that all rows have in common, before the first wanted state: that of the token
    before the first at mask 1. 0 if sharing them saves little.
    """
    wanted = (mask_BT > 0).any(dim=0).nonzero()
    if len(ids_BT) < 2 or not len(wanted):
        return 0
    differs = (ids_BT != ids_BT[:1]).any(dim=0).nonzero()
    alike = int(differs[0]) if len(differs) else ids_BT.shape[1]
    length = min(alike, int(wanted[0]) - 1)
    return length if length * (len(ids_BT) - 1) >= _LEAST_SAVED else 0


def states_behind(decoder: nn.Module, ids_BT: Tensor, length: int) -> Tensor:
    """Hidden states [B, T - length, H] after the first `length` tokens, which are the same in every
    row.
    """
    if not length:
        return decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
    prefix = DynamicCache()
    decoder(input_ids=ids_BT[:1, :length], past_key_values=prefix, use_cache=True)
    behind = BehindPrefix()
    behind.layers = prefix.layers
    found = decoder(input_ids=ids_BT[:, length:], past_key_values=behind, use_cache=True)
    return found.last_hidden_state
