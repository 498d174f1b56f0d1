"""Logits of an output layer, one tile of tokens x vocabulary at a time, and what the forward pass
keeps of them: a few numbers per token.

Tiles are made in a reused buffer, so that no [N, V] tensor exists. The tiles of a token's row are
folded in one after the other (an online logsumexp, ALGORITHMS 2.5).

Shapes: N tokens, V vocabulary, H hidden size, K ids per token, S of them also at temperature T; n x
c one tile.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What the forward pass finds of each token: log-probs of the ids, those at temperature T of
    the first S, entropy, logsumexp at 1 and at T, the likeliest ids and their log-probs.
    """

    logprobs_NK: Tensor
    tempered_NS: Tensor | None
    entropy_N: Tensor | None
    logsumexp_N: Tensor
    tempered_logsumexp_N: Tensor | None
    top_ids_NK: Tensor
    top_NK: Tensor


def token_values(
    tiles: LogitTiles,
    ids_NK: Tensor,
    inverse_temperatures_N: Tensor | None,
    *,
    sampled_columns: int,
    want_entropy: bool,
    top_k: int,
) -> TokenValues:
    """One pass over all tiles; `sampled_columns` is S."""
    statistics = _TokenStatistics(
        tiles, ids_NK, inverse_temperatures_N, want_entropy=want_entropy, top_k=top_k
    )
    # Autocast would round the logits too coarsely for log-probs.
    with torch.autocast(tiles.hidden_NH.device.type, enabled=False):
        statistics.add_all(tiles)
    return TokenValues(
        logprobs_NK=statistics.logprobs(statistics.picked_NK),
        tempered_NS=statistics.tempered_logprobs(statistics.picked_NK[:, :sampled_columns]),
        entropy_N=statistics.entropy_N(),
        logsumexp_N=statistics.logsumexp_N(),
        tempered_logsumexp_N=statistics.tempered_logsumexp_N(),
        top_ids_NK=statistics.top_ids_NK,
        top_NK=statistics.logprobs(statistics.top_NK),
    )


class _TokenStatistics:
    """Running maximum and sums per token over the tiles of its row.

    With m the maximum so far and y = logit - m: sum exp(y), sum exp(y / T), sum exp(y) y. A sum is
    rescaled whenever m grows.
    """

    def __init__(
        self,
        tiles: LogitTiles,
        ids_NK: Tensor,
        inverse_temperatures_N: Tensor | None,
        *,
        want_entropy: bool,
        top_k: int,
    ):
        hidden_NH = tiles.hidden_NH
        num_tokens = hidden_NH.shape[0]
        zeros_N = hidden_NH.new_zeros(num_tokens)
        self._ids_NK = ids_NK
        self._inverse_N = inverse_temperatures_N
        # Finite, or the first rescaling would be inf - inf.
        self._max_N = torch.full_like(zeros_N, torch.finfo(hidden_NH.dtype).min)
        self._sum_N = zeros_N
        tempered = inverse_temperatures_N is not None
        self._tempered_N = zeros_N.clone() if tempered else None
        self._product_N = zeros_N.clone() if want_entropy else None
        self._scratch = tiles.buffer() if tempered or want_entropy else None
        self.picked_NK = hidden_NH.new_zeros(ids_NK.shape)
        self.top_NK = hidden_NH.new_full((num_tokens, top_k), -torch.inf)
        self.top_ids_NK = ids_NK.new_zeros((num_tokens, top_k))

    def add_all(self, tiles: LogitTiles) -> None:
        """Every tile of the vocabulary by every slice of the tokens."""
        buffer = tiles.buffer()
        for tile in tiles.vocab_tiles():
            for rows in tiles.token_slices():
                self.add(rows, tile, tiles.logits(rows, tile, buffer))

    def add(self, rows: slice, tile: VocabTile, logits_nc: Tensor) -> None:
        """Fold a tile in; its content is destroyed."""
        self._pick(rows, tile, logits_nc)
        if self.top_NK.shape[1]:
            self._merge_top(rows, tile, logits_nc)
        maximum_n = torch.maximum(self._max_N[rows], logits_nc.amax(dim=1))
        grown_n = self._max_N[rows] - maximum_n
        self._max_N[rows] = maximum_n
        logits_nc.sub_(maximum_n.unsqueeze(1))
        if self._tempered_N is not None:
            self._add_tempered(self._tempered_N[rows], rows, grown_n, logits_nc)
        if self._product_N is None:
            sum_n = logits_nc.exp_().sum(dim=1)
        else:
            sum_n = self._add_product(self._product_N[rows], rows, grown_n, logits_nc)
        self._sum_N[rows].mul_(grown_n.exp()).add_(sum_n)

    def logprobs(self, logits_NK: Tensor) -> Tensor:
        """[N, K] at temperature 1, of some of each token's logits.

        The maximum first: next to it the sum's logarithm is small, and log-probs near 0 are exact.
        """
        return (logits_NK - self._max_N.unsqueeze(1)) - self._sum_N.log().unsqueeze(1)

    def tempered_logprobs(self, logits_NK: Tensor) -> Tensor | None:
        """[N, K] of logits / T."""
        if self._tempered_N is None or self._inverse_N is None:
            return None
        below_NK = (logits_NK - self._max_N.unsqueeze(1)) * self._inverse_N.unsqueeze(1)
        return below_NK - self._tempered_N.log().unsqueeze(1)

    def logsumexp_N(self) -> Tensor:
        """[N] at temperature 1."""
        return self._max_N + self._sum_N.log()

    def tempered_logsumexp_N(self) -> Tensor | None:
        """[N] of logits / T."""
        if self._tempered_N is None or self._inverse_N is None:
            return None
        return self._max_N * self._inverse_N + self._tempered_N.log()

    def entropy_N(self) -> Tensor | None:
        """[N] at temperature 1: log sum exp(y) - sum exp(y) y / sum exp(y)."""
        if self._product_N is None:
            return None
        return self._sum_N.log() - self._product_N / self._sum_N

    def _pick(self, rows: slice, tile: VocabTile, logits_nc: Tensor) -> None:
        columns_nK, inside_nK = tile.local_ids(self._ids_NK[rows])
        picked_nK = self.picked_NK[rows]
        picked_nK.copy_(torch.where(inside_nK, logits_nc.gather(1, columns_nK), picked_nK))

    def _merge_top(self, rows: slice, tile: VocabTile, logits_nc: Tensor) -> None:
        top_k = self.top_NK.shape[1]
        values, columns = torch.topk(logits_nc, min(top_k, tile.size), dim=1)
        values = torch.cat([self.top_NK[rows], values], dim=1)
        ids = torch.cat([self.top_ids_NK[rows], columns + tile.start], dim=1)
        best_nK, places_nK = torch.topk(values, top_k, dim=1)
        self.top_NK[rows] = best_nK
        self.top_ids_NK[rows] = ids.gather(1, places_nK)

    def _add_tempered(self, sum_n: Tensor, rows: slice, grown_n: Tensor, y_nc: Tensor) -> None:
        assert self._inverse_N is not None
        assert self._scratch is not None
        inverse_n = self._inverse_N[rows]
        scaled_nc = torch.mul(y_nc, inverse_n.unsqueeze(1), out=self._scratch.view(*y_nc.shape))
        sum_n.mul_((grown_n * inverse_n).exp()).add_(scaled_nc.exp_().sum(dim=1))

    def _add_product(self, product_n: Tensor, rows: slice, grown_n: Tensor, y_nc: Tensor) -> Tensor:
        """Sum of exp(y) over this tile; adds that of exp(y) y to `product_n`."""
        assert self._scratch is not None
        y_nc.clamp_(min=LOWEST_LOG_PROBABILITY)
        exp_nc = torch.exp(y_nc, out=self._scratch.view(*y_nc.shape))
        # Of the sums before this tile: y grows by `grown_n` in each of their terms.
        before_n = (product_n + grown_n * self._sum_N[rows]) * grown_n.exp()
        product_n.copy_(before_n).add_(y_nc.mul_(exp_nc).sum(dim=1))
        return exp_nc.sum(dim=1)
