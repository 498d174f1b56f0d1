"""The probability that at least one of k tries succeeds, from n tries of which c did.

Formulas: ALGORITHMS 8.1.
"""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): unbiased, as the product 1 - prod (n-c-i)/(n-i).

    1 if fewer than k tries failed. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} tries, got {n}; sample more or fit a model")
    if n - c < k:
        return 1.0
    missed = 1.0
    for i in range(k):
        missed *= (n - c - i) / (n - i)
    return 1.0 - missed


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """The mean of `pass_at_k` over problems given as (c, n). Raises ValueError for none."""
    if not counts:
        raise ValueError("pass@k of no problems; give (c, n) of at least one")
    return sum(pass_at_k(n, c, k) for c, n in counts) / len(counts)


def _check(n: int, c: int, k: int) -> None:
    if n < 1 or not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k needs n >= 1, 0 <= c <= n and k >= 1; got n={n}, c={c}, k={k}")
