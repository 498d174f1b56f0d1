"""KL estimators: `verl091_kl_penalty`, `slime_approx_kl`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.golden_maps.check import (
    FLOAT32_INSIDE_TOLERANCE,
    Case,
    Comparison,
    Deliberate,
    GoldenMap,
    Meta,
)
from trainer.objectives.distributions.kl import K3_LIMIT, kl_estimate
from trainer.objectives.names import canonical_kl_name

CLAMPED = "9 item 15: k3 is clamped as verl does it; slime leaves it unclamped"
OVERFLOWN = "0.1: the log-ratio is clamped before exp; slime overflows to inf and NaN"


def verl_kl_penalty(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Value and gradient of one estimator, non-finite inputs included."""
    inputs, outputs = case["inputs"], case["outputs"]
    value, gradient = _estimate(case["mode"], inputs["logprob"], inputs["ref_logprob"], None)
    yield Comparison(name="kl", ours=value, reference=outputs["kl"])
    yield Comparison(name="grad", ours=gradient, reference=outputs["grad_logprob_of_sum"])


def slime_approx_kl(case: Case, meta: Meta) -> Iterator[Comparison]:
    """Value and gradient; k3's clamped tokens apart, where slime has no clamp."""
    inputs, outputs = case["inputs"], case["outputs"]
    value, gradient = _estimate(
        case["mode"], inputs["log_probs"], inputs["log_probs_base"], inputs["importance_ratio"]
    )
    base, _ = canonical_kl_name(case["mode"])
    clamped = value >= K3_LIMIT if base == "k3" else torch.zeros_like(value, dtype=torch.bool)
    ours = torch.stack([value, gradient])
    references = torch.stack([outputs["kl"], outputs["grad_of_sum"]])
    # low_var_kl has the last clamp in slime too: it differs where exp overflows, if so.
    is_broken = ~torch.isfinite(references).all(dim=0)
    apart = clamped if case["mode"] == "k3" else clamped & is_broken
    for row, name in enumerate(("kl", "grad")):
        if not bool(apart.all()) or not apart.numel():
            yield Comparison(
                name=name,
                ours=ours[row, ~apart],
                reference=references[row, ~apart],
                tolerance=FLOAT32_INSIDE_TOLERANCE,
            )
    if bool(apart.any()):
        expected = torch.stack([torch.full_like(value, K3_LIMIT), torch.zeros_like(value)])
        yield Comparison(
            name="kl and grad of clamped tokens",
            ours=ours[:, apart],
            reference=references[:, apart],
            tolerance=FLOAT32_INSIDE_TOLERANCE,
            deliberate=Deliberate(
                reason=CLAMPED if case["mode"] == "k3" else OVERFLOWN, expected=expected[:, apart]
            ),
        )


def _estimate(
    mode: str, logprobs: Tensor, other_logprobs: Tensor, importance_ratio: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values per token, and the gradient of their sum with respect to `logprobs`."""
    leaf = logprobs.detach().clone().requires_grad_()
    value = kl_estimate(mode, leaf, other_logprobs, importance_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


MAPS: dict[str, GoldenMap] = {
    "verl091_kl_penalty": verl_kl_penalty,
    "slime_approx_kl": slime_approx_kl,
}
