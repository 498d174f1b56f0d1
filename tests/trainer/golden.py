"""Reading golden vectors: tensors are {shape, dtype, data}, non-finite numbers are strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "data" / "golden"
MORE_FOLDER = FOLDER.with_name("golden_more")


def cases(name: str) -> list[Any]:
    """The cases of one file, tensors decoded, as pytest parameters."""
    import pytest

    content = json.loads((FOLDER / f"{name}.json").read_text())
    return [
        pytest.param(decode(case), id=str(case.get("name", i)))
        for i, case in enumerate(content["cases"])
    ]


def decode(value: Any) -> Any:
    """Tensors out of their JSON form, at any depth."""
    if isinstance(value, dict) and value.get("__tensor__"):
        data = [float(item) for item in value["data"]]
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(data, dtype=dtype).reshape(value["shape"])
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def tolerance(tensor: torch.Tensor) -> dict[str, float]:
    """2e-5 in float32 and 1e-8 in float64, relative and absolute."""
    size = 1e-8 if tensor.dtype == torch.float64 else 2e-5
    return {"rtol": size, "atol": size}
