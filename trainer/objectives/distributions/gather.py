"""What two supports of tokens have in common.

Shapes: any leading [...], K and J support.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def shared_ids(ids: Tensor, other_ids: Tensor) -> Tensor:
    """Bool [..., K]: which of `ids` are also in the same position's `other_ids` [..., J].

    Negative ids mark empty places and are shared with nothing. Raises ValueError if the leading
    shapes differ.
    """
    if ids.shape[:-1] != other_ids.shape[:-1]:
        raise ValueError(
            f"id sets of shapes {tuple(ids.shape)} and {tuple(other_ids.shape)} must agree in all "
            "but the last dimension"
        )
    if not other_ids.shape[-1]:
        return torch.zeros_like(ids, dtype=torch.bool)
    # A search in sorted rows: comparing every pair would take K x J per token.
    ordered = other_ids.long().sort(dim=-1).values
    places = torch.searchsorted(ordered, ids.long().contiguous()).clamp(max=ordered.shape[-1] - 1)
    return (ordered.gather(-1, places) == ids) & (ids >= 0)


def overlap_counts(ids: Tensor, other_ids: Tensor) -> Tensor:
    """How many ids [...] the two sets of each position have in common, int64."""
    return shared_ids(ids, other_ids).sum(dim=-1)
