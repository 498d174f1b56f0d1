"""Logits of an output layer, one tile of tokens x vocabulary at a time.

Tiles are made in a reused buffer, so that no [N, V] tensor exists. How they are used, forward and
backward, is not known here.

Shapes: N tokens, V vocabulary, H hidden size, K ids per token; n x c one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# exp() of it is 0 in every dtype, and its product with 0 is 0: masked (-inf) logits stay harmless.
LOWEST_LOG_PROBABILITY = -1e4


class Buffer:
    """Memory for one tile; a view of the wanted size is filled by the caller."""

    def __init__(self, like: Tensor, size: int):
        self._flat = like.new_empty(size)

    def view(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], contiguous, of unknown content."""
        return self._flat[: rows * columns].view(rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabTile:
    """Ids start .. start + c of the vocabulary; `weight_cH` and `bias_c` are in hidden's dtype."""

    start: int
    weight_cH: Tensor
    bias_c: Tensor | None

    @property
    def size(self) -> int:
        """c."""
        return self.weight_cH.shape[0]

    def local_ids(self, ids_nK: Tensor) -> tuple[Tensor, Tensor]:
        """(columns within the tile, whether each id is in it); columns of other ids are valid."""
        columns_nK = ids_nK - self.start
        inside_nK = (columns_nK >= 0) & (columns_nK < self.size)
        return columns_nK.clamp(0, self.size - 1), inside_nK


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTiles:
    """Where the tiles come from. `hidden_NH` is in the dtype of the arithmetic (float32 or 64);
    weight and bias may be of lower precision and are converted tile by tile.
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    softcap: float | None
    chunk_tokens: int
    chunk_vocab: int

    def buffer(self) -> Buffer:
        """Memory for the largest tile."""
        rows = min(self.chunk_tokens, self.hidden_NH.shape[0])
        return Buffer(self.hidden_NH, rows * min(self.chunk_vocab, self.weight_VH.shape[0]))

    def vocab_tiles(self) -> Iterator[VocabTile]:
        """Slices of the output layer, in order."""
        dtype = self.hidden_NH.dtype
        for start in range(0, self.weight_VH.shape[0], self.chunk_vocab):
            part = slice(start, start + self.chunk_vocab)
            bias_c = None if self.bias_V is None else self.bias_V[part].to(dtype)
            yield VocabTile(start=start, weight_cH=self.weight_VH[part].to(dtype), bias_c=bias_c)

    def select(self, index_N: Tensor) -> LogitTiles:
        """The same layer on some of the tokens."""
        return replace(self, hidden_NH=self.hidden_NH[index_N])

    def token_slices(self) -> Iterator[slice]:
        """Slices of the tokens, in order."""
        num_tokens = self.hidden_NH.shape[0]
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))

    def logits(self, rows: slice, tile: VocabTile, buffer: Buffer) -> Tensor:
        """[n, c] logits of these tokens, written into the buffer."""
        hidden_nH = self.hidden_NH[rows]
        logits_nc = buffer.view(hidden_nH.shape[0], tile.size)
        torch.mm(hidden_nH, tile.weight_cH.t(), out=logits_nc)
        if tile.bias_c is not None:
            logits_nc.add_(tile.bias_c)
        if self.softcap is not None:
            logits_nc.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_nc
