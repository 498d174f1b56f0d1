"""What the forward pass of logprobs.py keeps of the logits: a few numbers per token.

The tiles of a token's row are folded in one after the other (an online logsumexp, ALGORITHMS 2.5).

Shapes: N tokens, V vocabulary, H hidden size, K ids per token; n x c one tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.linear.tiles import LOWEST_LOG_PROBABILITY, LogitTiles, VocabTile


class TokenStatistics:
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
