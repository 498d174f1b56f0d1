"""Gradients of what logprobs.py gives, tile by tile, from logits that are computed again.

With z the logits, p = softmax(z), q = softmax(z / T), H the entropy of p, and g the incoming
gradients (g_k of id k's log-prob at temperature 1, g'_k of that at T):

    dz_v = (g_logsumexp - sum_k g_k) p_v - g_H p_v (log p_v + H) - (sum_k g'_k / T) q_v
           + sum over the k whose id is v of (g_k + g'_k / T)

It is built in place of the tile's logits and added to the gradients of the hidden states and of the
output layer at once. Tokens without a gradient are left out: a NaN there reaches nothing.

Shapes: N tokens, V vocabulary, H hidden size, K ids per token, S of them also at temperature T; n x
c one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.objectives.linear.tiles import LOWEST_LOG_PROBABILITY, Buffer, LogitTiles, VocabTile

Rows = TypeVar("Rows", bound="_PerToken")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PerToken:
    """Tensors whose first dimension is N, or None."""

    def rows(self: Rows, index: slice | Tensor) -> Rows:
        """Those of some tokens."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{n: None if v is None else v[index] for n, v in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenState(_PerToken):
    """What the backward pass needs of each token; [N], ids [N, K]."""

    ids_NK: Tensor
    logsumexp_N: Tensor
    entropy_N: Tensor | None
    inverse_temperatures_N: Tensor | None
    tempered_logsumexp_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coefficients(_PerToken):
    """What multiplies p, -p (log p + H), q and the ones at the ids; None: there is no such part."""

    softmax_N: Tensor | None
    entropy_N: Tensor | None
    tempered_N: Tensor | None
    picked_NK: Tensor | None

    @classmethod
    def of(
        cls,
        state: TokenState,
        logprobs_NK: Tensor | None,
        tempered_NS: Tensor | None,
        entropy_N: Tensor | None,
        logsumexp_N: Tensor | None,
    ) -> _Coefficients:
        """From the incoming gradients; those at T are of the first S ids."""
        softmax_N, tempered_N, picked_NK = logsumexp_N, None, logprobs_NK
        if logprobs_NK is not None:
            total_N = -logprobs_NK.sum(dim=1)
            softmax_N = total_N if softmax_N is None else softmax_N + total_N
        if tempered_NS is not None:
            assert state.inverse_temperatures_N is not None
            tempered_NS = tempered_NS * state.inverse_temperatures_N.unsqueeze(1)
            tempered_N = -tempered_NS.sum(dim=1)
            picked_NK = (
                tempered_NS.new_zeros(state.ids_NK.shape)
                if picked_NK is None
                else picked_NK.clone()
            )
            picked_NK[:, : tempered_NS.shape[1]] += tempered_NS
        return cls(
            softmax_N=softmax_N, entropy_N=entropy_N, tempered_N=tempered_N, picked_NK=picked_NK
        )

    def active_N(self) -> Tensor | None:
        """Tokens with a gradient; None: nothing has one."""
        found = [
            part_N != 0
            for part_N in (self.softmax_N, self.entropy_N, self.tempered_N)
            if part_N is not None
        ]
        if self.picked_NK is not None:
            found.append((self.picked_NK != 0).any(dim=1))
        return torch.stack(found).any(dim=0) if found else None


def layer_gradients(
    tiles: LogitTiles,
    state: TokenState,
    incoming: Sequence[Tensor | None],
    wanted: Sequence[bool],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Gradients of hidden states (in `dtype`), weight and bias, each None if not `wanted`, from the
    `incoming` ones of log-probs, log-probs at T, entropy and logsumexp; all None without any.
    """
    logprobs_NK, tempered_NS, entropy_N, logsumexp_N = incoming
    coefficients = _Coefficients.of(state, logprobs_NK, tempered_NS, entropy_N, logsumexp_N)
    active_N = coefficients.active_N()
    if active_N is None:
        return [None] * 3
    hidden_NH, index_M = tiles.hidden_NH, None
    if not bool(active_N.all()):
        index_M = active_N.nonzero().squeeze(1)
        tiles, state = tiles.select(index_M), state.rows(index_M)
        coefficients = coefficients.rows(index_M)
    wants_hidden, wants_weight, wants_bias = wanted
    sums = _LayerGradients(tiles, hidden=wants_hidden, weight=wants_weight, bias=wants_bias)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        sums.add_all(tiles, state, coefficients)
    gradient_NH = None if sums.hidden_NH is None else sums.hidden_NH.to(dtype)
    if gradient_NH is not None and index_M is not None:
        zeros_NH = torch.zeros_like(hidden_NH, dtype=dtype)
        gradient_NH = zeros_NH.index_copy_(0, index_M, gradient_NH)
    return [gradient_NH, sums.weight_VH, sums.bias_V]


class _LayerGradients:
    """Sums over tiles; a gradient that is not wanted stays None."""

    def __init__(self, tiles: LogitTiles, *, hidden: bool, weight: bool, bias: bool):
        layer = tiles.weight_VH
        num_tokens = tiles.hidden_NH.shape[0]
        # Without tokens nothing would write the rows.
        make = torch.empty if num_tokens else torch.zeros
        self.hidden_NH = torch.zeros_like(tiles.hidden_NH) if hidden else None
        self.weight_VH = (
            make(layer.shape, dtype=layer.dtype, device=layer.device) if weight else None
        )
        self.bias_V = tiles.hidden_NH.new_zeros(layer.shape[0]) if bias else None

    def add_all(self, tiles: LogitTiles, state: TokenState, coefficients: _Coefficients) -> None:
        """Every tile of the vocabulary by every slice of the tokens."""
        builder = _TileBuilder(tiles, coefficients)
        for tile in tiles.vocab_tiles():
            sum_cH = self._weight_rows(tile)
            for rows in tiles.token_slices():
                gradient_nc = builder.build(rows, tile, state.rows(rows), coefficients.rows(rows))
                self._add(rows, tile, gradient_nc, tiles.hidden_NH[rows], sum_cH)
            if self.weight_VH is not None and sum_cH is not None and not self._in_place(tile):
                self.weight_VH[tile.start : tile.start + tile.size] = sum_cH

    def _weight_rows(self, tile: VocabTile) -> Tensor | None:
        """Where the tile's rows are summed: their own place, or memory of higher precision."""
        if self.weight_VH is None:
            return None
        if self._in_place(tile):
            return self.weight_VH[tile.start : tile.start + tile.size]
        return torch.empty_like(tile.weight_cH)

    def _in_place(self, tile: VocabTile) -> bool:
        return self.weight_VH is not None and self.weight_VH.dtype == tile.weight_cH.dtype

    def _add(
        self,
        rows: slice,
        tile: VocabTile,
        gradient_nc: Tensor,
        hidden_nH: Tensor,
        sum_cH: Tensor | None,
    ) -> None:
        if self.hidden_NH is not None:
            self.hidden_NH[rows].addmm_(gradient_nc, tile.weight_cH)
        if sum_cH is not None:
            if rows.start == 0:
                torch.mm(gradient_nc.t(), hidden_nH, out=sum_cH)
            else:
                sum_cH.addmm_(gradient_nc.t(), hidden_nH)
        if self.bias_V is not None:
            self.bias_V[tile.start : tile.start + tile.size] += gradient_nc.sum(dim=0)


class _TileBuilder:
    """Turns tiles of logits into gradients with respect to them, in the same few buffers."""

    def __init__(self, tiles: LogitTiles, parts: _Coefficients):
        def needed(condition: bool) -> Buffer | None:
            return tiles.buffer() if condition else None

        alone = parts.softmax_N is None and parts.entropy_N is None
        self._tiles = tiles
        self._logits = tiles.buffer()
        self._tempered = needed(parts.tempered_N is not None and not alone)
        self._entropy = needed(parts.entropy_N is not None)
        self._slope = needed(tiles.softcap is not None)

    def build(
        self, rows: slice, tile: VocabTile, state: TokenState, parts: _Coefficients
    ) -> Tensor:
        """[n, c] gradient of this tile's logits, before the softcap."""
        logits_nc = self._tiles.logits(rows, tile, self._logits)
        slope_nc = None
        if self._slope is not None:
            assert self._tiles.softcap is not None
            slope_nc = self._slope.view(*logits_nc.shape).copy_(logits_nc)
            slope_nc.div_(self._tiles.softcap).square_().neg_().add_(1.0)
        tempered_nc = None
        if parts.tempered_N is not None:
            tempered_nc = _tempered(logits_nc, self._tempered, state, parts.tempered_N)
        gradient_nc = logits_nc
        if parts.entropy_N is not None or parts.softmax_N is not None:
            _plain(logits_nc, self._entropy, state, parts)
            if tempered_nc is not None:
                gradient_nc.add_(tempered_nc)
        if parts.picked_NK is not None:
            columns_nK, inside_nK = tile.local_ids(state.ids_NK)
            ones_nK = torch.where(inside_nK, parts.picked_NK, torch.zeros_like(parts.picked_NK))
            gradient_nc.scatter_add_(1, columns_nK, ones_nK)
        return gradient_nc if slope_nc is None else gradient_nc.mul_(slope_nc)


def _tempered(
    logits_nc: Tensor, buffer: Buffer | None, state: TokenState, tempered_n: Tensor
) -> Tensor:
    """Coefficient times q, in place of the logits if there is no buffer."""
    assert state.inverse_temperatures_N is not None
    assert state.tempered_logsumexp_N is not None
    target_nc = logits_nc if buffer is None else buffer.view(*logits_nc.shape)
    torch.mul(logits_nc, state.inverse_temperatures_N.unsqueeze(1), out=target_nc)
    target_nc.sub_(state.tempered_logsumexp_N.unsqueeze(1)).exp_()
    return target_nc.mul_(tempered_n.unsqueeze(1))


def _plain(
    logits_nc: Tensor, buffer: Buffer | None, state: TokenState, parts: _Coefficients
) -> None:
    """In place: p (coefficient - g_H (log p + H))."""
    logits_nc.sub_(state.logsumexp_N.unsqueeze(1))
    if parts.entropy_N is None or buffer is None:
        assert parts.softmax_N is not None
        logits_nc.exp_().mul_(parts.softmax_N.unsqueeze(1))
        return
    assert state.entropy_N is not None
    constant_n = -parts.entropy_N * state.entropy_N
    if parts.softmax_N is not None:
        constant_n = constant_n + parts.softmax_N
    logits_nc.clamp_(min=LOWEST_LOG_PROBABILITY)
    factor_nc = torch.mul(
        logits_nc, -parts.entropy_N.unsqueeze(1), out=buffer.view(*logits_nc.shape)
    )
    logits_nc.exp_().mul_(factor_nc.add_(constant_n.unsqueeze(1)))
