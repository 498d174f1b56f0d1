"""Values at mask 0 that are not finite: what we make of the rest does not depend on them (0.1).

References take them into their sums, where 0 times NaN is NaN. What we expect of ourselves there is
our own result on the same case with these values replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.golden_maps.check import Case, Comparison, Deliberate, GoldenMap, Meta

MASKS = ("mask", "response_mask", "loss_mask", "loss_masks")
IN_PLACE = -1.0
"""A log-prob, an advantage or a logit like any other."""


def without_garbage(case: Any) -> Case | None:
    """The case with every non-finite value at mask 0 replaced; None if there is none."""
    inputs = case.get("inputs") if isinstance(case, dict) else None
    masks = [inputs[name] for name in MASKS if name in inputs] if isinstance(inputs, dict) else []
    if len(masks) != 1 or not isinstance(masks[0], Tensor):
        return None
    found = False
    clean: dict[str, Any] = dict(case)
    for section in ("inputs", "kwargs"):
        values = case.get(section) or {}
        clean[section] = dict(values)
        for name, value in values.items():
            broken = _broken(value, masks[0])
            if broken is not None and bool(broken.any()):
                clean[section][name] = torch.where(broken, IN_PLACE, value)
                found = True
    return clean if found else None


def _broken(value: Any, mask: Tensor) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value is mask:
        return None
    if value.shape[: mask.ndim] != mask.shape:
        return None
    outside = (mask == 0).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))
    return ~torch.isfinite(value) & outside


def declare(
    comparisons: Sequence[Comparison], case: Any, evaluate: GoldenMap, meta: Meta
) -> tuple[Comparison, ...]:
    """`comparisons` of a case; with garbage at mask 0 they must equal those without it."""
    clean = without_garbage(case)
    if clean is None:
        return tuple(comparisons)
    expected = {one.name: one.ours for one in evaluate(clean, meta)}
    return tuple(
        one
        if one.deliberate is not None or one.name not in expected
        else replace(
            one,
            deliberate=Deliberate(
                reason="0.1: mask before arithmetic", expected=expected[one.name]
            ),
        )
        for one in comparisons
    )
