"""How much the worth of a state rises from one to the next (ALGORITHMS 8.5).

Shape: E states, in the order of a session.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def marginal_utilities(values_E: Tensor) -> Tensor:
    """U_i = V_(i+1) - V_i [E - 1]. Raises ValueError for fewer than two values."""
    if len(values_E) < 2:
        raise ValueError("utilities need at least two values")
    return values_E[1:] - values_E[:-1]
