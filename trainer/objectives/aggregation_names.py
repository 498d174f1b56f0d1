"""Names of the reductions from tokens to one number (ALGORITHMS 2.8). It imports no torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

AggregationMode: TypeAlias = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "turn-mean-token-mean",
    "seq-mean-turn-mean",
]
