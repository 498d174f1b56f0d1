"""Products of float32 matrices on processors that MKL does not use well.

torch leaves them to Intel's MKL, which uses less than half of an AMD processor: SmolLM2-135M's
matrices are 1.8 to 2.6 times as fast with oneDNN, which torch contains too, and as exact. torch
itself takes oneDNN for float32 only when it is allowed to round to bfloat16. oneDNN does that only
on processors with matrix units, which AMD's lack; it is checked before it is relied on.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_CPUINFO = Path("/proc/cpuinfo")
_EXACT = 1e-5
"""Largest relative error of a product that counts as one of float32; bfloat16 has about 2e-3."""


def compute_fast(model: nn.Module) -> None:
    """Let the linear layers of a model without gradients use the faster library, on its CPU."""
    if not _is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and _fits(module.weight):
            module.__class__ = FastLinear


def compute_all_fast() -> None:
    """Let this process use the faster library for all products of float32, gradients included."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not _is_faster() or not hasattr(matmul, "fp32_precision"):
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    if not _is_exact(functional.linear):
        matmul.fp32_precision = before


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] @ weight [O, I].T + bias, without a gradient. Both float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class FastLinear(nn.Linear):
    """A linear layer without a gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., O]."""
        if torch.is_grad_enabled() or not _fits(input):
            return super().forward(input)
        return product(input, self.weight, self.bias)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A layer's own product, whatever its `forward` was replaced with."""
    return type(layer).forward(layer, x)


@cache
def _is_faster() -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops, "mkldnn"):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not _is_of_amd(_CPUINFO):
        return False
    return _is_exact(lambda x, weight: product(x, weight, None))


def _is_of_amd(cpuinfo: Path) -> bool:
    try:
        return "AuthenticAMD" in cpuinfo.read_text()
    except OSError:
        return False


def _is_exact(linear: Any) -> bool:
    """Whether products of a usual size are those of float32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 576, generator=generator) for rows in (256, 512))
    exact = x.double() @ weight.double().T
    with torch.no_grad():
        error = (linear(x, weight).double() - exact).norm() / exact.norm()
    return bool(error < _EXACT)


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu"
