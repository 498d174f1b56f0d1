"""Products by oneDNN: the same numbers, only where they are faster, and gradients where needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollout_bridge.embedded.model import products
from rollout_bridge.embedded.model.products import (
    FastLinear,
    compute_all_fast,
    compute_fast,
    linear,
)

MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on an AMD processor, wherever this runs: oneDNN is in every build of torch for x86."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "_is_of_amd", lambda _: True)
    products._is_faster.cache_clear()
    yield
    products._is_faster.cache_clear()


@pytest.fixture
def precision() -> Iterator[None]:
    """The process's own setting comes back."""
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 64), (2, 1, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_are_those_of_float32(on_amd: None, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias)
    model = nn.Sequential(layer)
    x = torch.randn(shape)
    with torch.no_grad():
        before = model(x)
        compute_fast(model)
        assert type(layer) is FastLinear
        assert torch.allclose(model(x), before, rtol=1e-5, atol=1e-6)
        # Another forward in its place, as a row's adapter has, uses the same product.
        assert torch.equal(linear(layer, x), model(x))


def test_a_gradient_is_computed_as_ever(on_amd: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compute_fast(model)
    model(x).sum().backward()
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert expected is not None
        assert torch.equal(parameter.grad, expected)


def test_other_types_and_other_layers_are_left_alone(on_amd: None) -> None:
    half, other = nn.Linear(8, 8).bfloat16(), nn.Embedding(8, 8)
    compute_fast(nn.Sequential(other, half))
    assert (type(half), type(other)) == (nn.Linear, nn.Embedding)


def test_weights_that_are_exchanged_count(on_amd: None) -> None:
    layer = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(layer)
    compute_fast(model)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(8))
        x = torch.randn(2, 8)
        assert torch.allclose(model(x), x)


def test_a_process_that_rounds_goes_back(
    on_amd: None, precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    MATMUL.fp32_precision = "ieee"
    assert products._is_faster()
    monkeypatch.setattr(products, "_is_exact", lambda _: False)
    compute_all_fast()
    assert MATMUL.fp32_precision == "ieee"
    monkeypatch.setattr(products, "_is_exact", lambda _: True)
    compute_all_fast()
    assert MATMUL.fp32_precision == "bf16"


def test_rounding_to_bfloat16_is_not_exact() -> None:
    def rounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ weight.bfloat16().T).float()

    assert not products._is_exact(rounded)
    assert products._is_exact(torch.nn.functional.linear)


@pytest.mark.parametrize(
    ("text", "is_amd"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False), (None, False)],
)
def test_the_makers_name_decides(text: str | None, is_amd: bool, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert products._is_of_amd(file) is is_amd
