"""What each token may attend to: causal by position, and within the window of its layer.

The cache keeps every position, even for layers with a window: only the mask limits what such a
layer sees. A model with layers of both kinds takes one mask for each kind, by its name.

Shape legend: B rows, T tokens of a row in one forward, L key positions.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout_bridge.embedded.model.supported import FULL, SLIDING

Mask = torch.Tensor | dict[str, torch.Tensor]


class Masks:
    """The masks of one model, read from its configuration."""

    def __init__(self, model_config: Any, dtype: torch.dtype, device: torch.device):
        self._windows = attention_windows(model_config)
        self._dtype = dtype
        self._masked = torch.finfo(dtype).min
        self._positions_L = torch.arange(0, device=device)

    def of(self, positions_BT: torch.Tensor, length: int) -> Mask:
        """Additive masks [B, 1, T, L], 0 where a key may be seen: one, or one per kind of layer."""
        if self._positions_L.shape[0] < length:
            self._positions_L = torch.arange(2 * length, device=self._positions_L.device)
        masks = {
            kind: self._mask(positions_BT[:, :, None], length, window)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, positions_BT1: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
        keys_L = self._positions_L[:length]
        hidden_BTL = keys_L > positions_BT1
        if window is not None:
            hidden_BTL |= keys_L <= positions_BT1 - window
        mask_BTL = torch.zeros(hidden_BTL.shape, dtype=self._dtype, device=keys_L.device)
        return mask_BTL.masked_fill_(hidden_BTL, self._masked)[:, None]


def attention_windows(model_config: Any) -> dict[str, int | None]:
    """A model's kinds of layers, each with how many positions it sees (None: all)."""
    text = model_config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds:
        is_used = window and getattr(text, "use_sliding_window", True)
        kinds = {SLIDING if is_used else FULL}
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}
