"""Names that a configuration chooses from: KL estimators, reductions, what may serve as a loss, and
the error for a name that is none of them.

Combinations that are mathematically wrong are refused before any model is loaded (ALGORITHMS 2.4,
7.1): a check raises a ValueError of one line that says what to choose instead, or returns a warning
of one line, or None. It imports no torch, because the configuration calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal, NamedTuple, TypeAlias


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """A ValueError that names the nearest valid name, or all of them where none is near."""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")


AggregationMode: TypeAlias = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "turn-mean-token-mean",
    "seq-mean-turn-mean",
]


KlRatio: TypeAlias = Literal["none", "unbiased", "clipped"]
"""What a KL to the frozen start is multiplied with (ALGORITHMS 6.10)."""

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_NAMES = frozenset({"k1", "abs", "k2", "k3", *_ALIASES})


class KlEstimator(NamedTuple):
    """`k1` | `abs` | `k2` | `k3`, and whether a `+` asks for the straight-through gradient."""

    base: str
    straight_through: bool


def canonical_kl_name(name: str) -> KlEstimator:
    """The estimator of this name.

    Raises ValueError for a name that is none of these or their aliases.
    """
    straight_through = name.endswith("+")
    base = name.removesuffix("+")
    if base not in KL_NAMES:
        raise ValueError(f"unknown KL estimator {name!r}; known: {sorted(KL_NAMES)}, each also +")
    return KlEstimator(_ALIASES.get(base, base), straight_through)


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


TOPK_MODES = frozenset({"forward_kl_topk", "topk_tail_reverse_kl"})
LOSS_MODES = frozenset({*KL_NAMES, *(f"{name}+" for name in KL_NAMES), *TOPK_MODES})


def check_loss_mode(loss_mode: str, *, use_policy_gradient: bool) -> str | None:
    """Whether the divergence may serve as a loss, or as an advantage with policy gradient.

    Raises ValueError for an unknown mode (with the nearest one), k1 as a loss under any of its
    names, k2 as an advantage, and a top-k divergence as an advantage. Warns of abs and k3 as one.
    """
    if loss_mode not in LOSS_MODES:
        raise unknown_name("loss_mode", loss_mode, LOSS_MODES)
    if loss_mode in TOPK_MODES:
        if use_policy_gradient:
            raise ValueError(
                f"loss_mode {loss_mode!r} with policy gradient blames the sampled token for the "
                "whole distribution's divergence; set use_policy_gradient false, or use k1"
            )
        return None
    base, straight_through = canonical_kl_name(loss_mode)
    if not use_policy_gradient:
        if base == "k1" and not straight_through:
            raise ValueError(
                f"loss_mode {loss_mode!r} without policy gradient has a gradient that ignores the "
                "teacher; use k1+, k2 or k3, or set use_policy_gradient true"
            )
        return None
    if base == "k2":
        raise ValueError(
            f"loss_mode {loss_mode!r} with policy gradient punishes every token, whatever the "
            "teacher thinks of it; use k1, or set use_policy_gradient false"
        )
    if base in ("abs", "k3"):
        return (
            f"loss_mode {loss_mode!r} with policy gradient gives no token a positive advantage: "
            "the direction is lost; k1 keeps it"
        )
    return None


def check_kl_terms(
    *, teacher_kl_is_loss: bool, reference_kl_coef: float, both_explicit: bool = False
) -> str | None:
    """What to set if a KL to the teacher and one to the start would act at once without being asked
    for; None otherwise (ALGORITHMS 2.4).

    `both_explicit`: the configuration names the second one's coefficient.
    """
    if teacher_kl_is_loss and reference_kl_coef > 0 and not both_explicit:
        return (
            "the objective is a KL to the teacher, and beta_kl, which is not set, would add one to "
            f"the start (its default is {reference_kl_coef:g}): set trainer.beta_kl = 0.0, or the "
            "weight that you want"
        )
    return None
