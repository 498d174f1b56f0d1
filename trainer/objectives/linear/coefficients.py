"""Per token: what the forward pass of logprobs.py kept, and what scales each gradient part.

They hold tensors [N] or [N, K] and know nothing of tiles; the formula is gradients.py's.

Shapes: N tokens, K ids per token, S of them also at temperature T.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    """What the forward pass kept of each token; [N], ids [N, K]."""

    ids_NK: Tensor
    logsumexp_N: Tensor
    entropy_N: Tensor | None
    inverse_temperatures_N: Tensor | None
    tempered_logsumexp_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients(_PerToken):
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
    ) -> Coefficients:
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
