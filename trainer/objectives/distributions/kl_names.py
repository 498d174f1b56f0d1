"""Names of the KL estimators and which of them may serve as a loss.

It imports no torch, because the configuration checks names with it.
"""

from __future__ import annotations

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_NAMES = frozenset({"k1", "abs", "k2", "k3", *_ALIASES})


def canonical_kl_name(name: str) -> tuple[str, bool]:
    """(`k1` | `abs` | `k2` | `k3`, whether a `+` asks for the straight-through gradient).

    Raises ValueError for a name that is none of these or their aliases.
    """
    straight_through = name.endswith("+")
    base = name.removesuffix("+")
    if base not in KL_NAMES:
        raise ValueError(f"unknown KL estimator {name!r}; known: {sorted(KL_NAMES)}, each also +")
    return _ALIASES.get(base, base), straight_through


def validate_kl_loss_name(name: str) -> None:
    """Raise ValueError for an estimator whose gradient as a loss does not depend on the reference.

    k1's gradient is 1 for every token (ALGORITHMS 7.1); its alias `kl` is rejected too.
    """
    base, straight_through = canonical_kl_name(name)
    if base == "k1" and not straight_through:
        raise ValueError(
            f"{name!r} as a loss has a gradient that ignores the reference; "
            "use low_var_kl, k2, abs or k1+"
        )
