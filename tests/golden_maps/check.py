"""Comparisons of one golden case with this project's functions, and how each of them ended.

A map turns a case into comparisons: a name, our value, the reference's value. A deliberate
difference also carries the reason (a section of ALGORITHMS.md) and the value that we expect of
ourselves, which is checked in its place. Nothing here computes a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

FLOAT32_TOLERANCE = 2e-5
FLOAT64_TOLERANCE = 1e-8
METRIC_TOLERANCE = 1e-4
K3_CHI2_TOLERANCE = 3e-4
"""Metrics that exponentiate: k3 and chi-squared."""
FLOAT32_INSIDE_TOLERANCE = 3e-5
"""References that compute in float32 whatever the input's type."""

EMPTY_MASK = "ALGORITHMS 0.1: an empty mask gives a differentiable zero"

Case = Mapping[str, Any]
Meta = Mapping[str, Any]


class Outcome(StrEnum):
    """How a comparison ended. `DIFFERENT` is deliberate and equal to our own expected value."""

    AGREED = "agreed"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliberate:
    """Why we differ, and what we expect instead: any nesting of numbers, tensors, None and text."""

    reason: str
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`ours` against `reference`, within `tolerance` (relative and absolute), which defaults to the
    one of the reference's type.
    """

    name: str
    ours: Any
    reference: Any
    tolerance: float | None = None
    deliberate: Deliberate | None = None

    def outcome(self) -> Outcome:
        """A difference that nobody declared fails, and so does a declared one that is not ours."""
        if self.deliberate is None:
            agrees = same(self.ours, self.reference, self.tolerance)
            return Outcome.AGREED if agrees else Outcome.FAILED
        if not same(self.ours, self.deliberate.expected, self.tolerance):
            return Outcome.FAILED
        agrees = same(self.ours, self.reference, self.tolerance)
        return Outcome.AGREED if agrees else Outcome.DIFFERENT

    def explain(self) -> str:
        """One line: what was compared with what, and the largest gap."""
        wanted = self.reference if self.deliberate is None else self.deliberate.expected
        why = f" [{self.deliberate.reason}]" if self.deliberate is not None else ""
        return f"{self.name}: ours {_short(self.ours)}, expected {_short(wanted)}{why}"


GoldenMap = Callable[[Case, Meta], Iterable[Comparison]]
"""The comparisons of one case of a file."""


def same(ours: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Equality of nested values; NaN equals NaN, infinities must match in sign."""
    if isinstance(expected, Mapping):
        return (
            isinstance(ours, Mapping)
            and ours.keys() == expected.keys()
            and all(same(ours[key], value, tolerance) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(ours, list | tuple)
            and len(ours) == len(expected)
            and all(same(a, b, tolerance) for a, b in zip(ours, expected, strict=True))
        )
    if isinstance(expected, Tensor):
        return _same_tensor(ours, expected, tolerance)
    if isinstance(ours, Tensor) and ours.numel() == 1:
        ours = ours.item()
    if expected is None or isinstance(expected, str | bool):
        return ours == expected
    if not isinstance(ours, int | float):
        return False
    size = tolerance if tolerance is not None else METRIC_TOLERANCE
    if math.isnan(expected) or math.isinf(expected):
        return math.isnan(ours) if math.isnan(expected) else ours == expected
    return math.isclose(ours, expected, rel_tol=size, abs_tol=size)


def _same_tensor(ours: Any, expected: Tensor, tolerance: float | None) -> bool:
    if not isinstance(ours, Tensor):
        ours = torch.as_tensor(ours)
    if ours.shape != expected.shape:
        return False
    if tolerance is None:
        is_double = expected.dtype == torch.float64
        tolerance = FLOAT64_TOLERANCE if is_double else FLOAT32_TOLERANCE
    return torch.allclose(
        ours.detach().double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 120 else text[:117] + "..."
