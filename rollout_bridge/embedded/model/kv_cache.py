"""Keys and values of the running requests: one row per request, rows 0..n-1 in use.

A transformers `Cache` whose rows have their own lengths: the caller says at which positions the
next tokens go (`begin`), and the attention mask decides what each of them sees. Whatever lies
beyond a row's length is never seen, so nothing needs clearing.

Shape legend: N layers, B rows, L positions, H key-value heads, D head size, T new tokens per row.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

_MIN_LENGTH = 256
_MIN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token needs in the cache; the same in every layer."""

    num_layers: int
    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        per_head = self.key_size + self.value_size
        return self.num_layers * self.num_heads * per_head * self.dtype.itemsize


class RowCache(Cache):
    """Keys [N, B, L, H, Dk] and values [N, B, L, H, Dv]; grows when asked to."""

    def __init__(self, shape: CacheShape, max_tokens: int):
        super().__init__(layers=[])
        self.shape = shape
        self.max_tokens = max_tokens
        self.keys, self.values = self._allocate(0, 0)
        self._rows = slice(0, 0)
        self._index: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._length = 0

    @property
    def num_rows(self) -> int:
        """Rows that there is memory for."""
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """Positions a row has memory for."""
        return self.keys.shape[2]

    def fits(self, num_rows: int, length: int) -> bool:
        """Whether `num_rows` rows of `length` tokens stay within the memory allowed."""
        return num_rows <= 1 or num_rows * length <= self.max_tokens

    def ensure(self, num_rows: int, length: int, num_used: int) -> None:
        """Make room for `num_rows` x `length`; the first `num_used` rows keep their content."""
        if num_rows <= self.num_rows and length <= self.length:
            return
        # Geometric growth, so that copying stays rare, as far as the memory allows.
        new_length, new_rows = self.length, self.num_rows
        if length > self.length:
            new_length = max(length, 2 * self.length, _MIN_LENGTH)
        if num_rows > self.num_rows:
            new_rows = max(num_rows, 2 * self.num_rows, _MIN_ROWS)
        new_length = max(length, min(new_length, self.max_tokens // num_rows))
        new_rows = max(num_rows, min(new_rows, self.max_tokens // new_length))
        keys, values = self._allocate(new_rows, new_length)
        kept = min(self.length, new_length)
        # Old pages go before the next ones are written: a CPU's memory never holds all of both.
        keys[:, :num_used, :kept] = self.keys[:, :num_used, :kept]
        self.keys = keys
        values[:, :num_used, :kept] = self.values[:, :num_used, :kept]
        self.values = values

    def begin(self, first_row: int, positions_BT: torch.Tensor, length: int) -> None:
        """The next forward writes rows `first_row`.. at these positions and reads `length`."""
        rows = positions_BT.shape[0]
        self._rows = slice(first_row, first_row + rows)
        rows_B1 = torch.arange(first_row, first_row + rows, device=positions_BT.device)[:, None]
        self._index = (rows_B1, positions_BT)
        self._length = length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another row."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: [B, H, T, D] in, [B, H, length, D] views out."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._index] = key_states.transpose(1, 2)
        values[self._index] = value_states.transpose(1, 2)
        return (
            keys[self._rows, : self._length].transpose(1, 2),
            values[self._rows, : self._length].transpose(1, 2),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the tokens being computed, for models that ask."""
        return self._length - self._index[1].shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys, for models that ask."""
        return self._length, 0

    def _allocate(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        prefix = (shape.num_layers, rows, length, shape.num_heads)
        return (
            _zeros((*prefix, shape.key_size), shape.dtype, shape.device),
            _zeros((*prefix, shape.value_size), shape.dtype, shape.device),
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: a masked position has weight 0, and 0 times NaN would be NaN. On a CPU
    the system allocates a page when it is first written, so unused rows cost nothing.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0 or device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
