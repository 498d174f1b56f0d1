"""LoRA adapters on one base: read from peft's folders, added to the rows that name them.

The layers of an adapter get a forward that adds the row's adapter to each row of a batch. Rows of
one adapter are computed together, rows of the base alone as before. An adapter that cannot be
served this way is refused by name when it is loaded. It knows no requests and no HTTP.

Shapes: B rows, T tokens, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout_bridge.embedded.errors import AdapterRejected
from rollout_bridge.embedded.model.products import linear

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_NOT_SERVED = (
    *("target_parameters", "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora"),
    *("layer_replication", "trainable_token_indices", "fan_in_fan_out", "lora_bias", "use_bdlora"),
)
"""Settings of peft that mean more than a product added to a linear layer."""
_PROBE = (2, 3)
"""Rows and tokens of the forward pass that shows how layers see their rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """What is added in the named layers: x [.., I] -> x @ down [I, R] @ up [R, O]."""

    name: str
    path: str
    layers: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlan:
    """Which rows of a batch get which adapter; None in place of rows: all of them."""

    groups: tuple[tuple[Adapter, Tensor | None], ...] = ()


class AdapterLayers:
    """The layers of one model that have adapters. `use` sets what the next forward adds where."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._plan = RowPlan()
        self._fitted: set[str] = set()

    def plan(self, adapters: Sequence[Adapter | None]) -> RowPlan:
        """The plan for rows 0.. of a batch."""
        first = next((one for one in adapters if one is not None), None)
        if first is None:
            return RowPlan()
        if all(one is first for one in adapters):
            return RowPlan(groups=((first, None),))
        groups = []
        for adapter in dict.fromkeys(one for one in adapters if one is not None):
            rows = [row for row, one in enumerate(adapters) if one is adapter]
            groups.append((adapter, torch.tensor(rows, device=self._device)))
        return RowPlan(groups=tuple(groups))

    def use(self, plan: RowPlan) -> None:
        """Follow this plan in the forward passes from here on."""
        self._plan = plan

    @torch.inference_mode()
    def fit(self, adapter: Adapter) -> None:
        """Prepare the layers for it. Raises AdapterRejected if one of them does not see a batch's
        rows as they are (experts get tokens of any row).
        """
        new = sorted(adapter.layers.keys() - self._fitted)
        if not new:
            return
        seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in new}
        hooks = [
            self._model.get_submodule(name).register_forward_pre_hook(_noting(seen[name]))
            for name in new
        ]
        plan, self._plan = self._plan, RowPlan()
        try:
            self._model(torch.zeros(_PROBE, dtype=torch.long, device=self._device))
        finally:
            self._plan = plan
            for hook in hooks:
                hook.remove()
        odd = [name for name in new if seen[name] != {_PROBE}]
        if odd:
            raise AdapterRejected(
                f"{adapter.path}: {odd[0]} does not see the rows of a batch as they are (it may be "
                "an expert): its adapter can only be served merged"
            )
        for name in new:
            module: Any = self._model.get_submodule(name)
            module.forward = self._forward_of(module, name)
            self._fitted.add(name)

    def _forward_of(self, module: nn.Linear, name: str) -> Callable[[Tensor], Tensor]:
        def forward(x_BTI: Tensor) -> Tensor:
            out_BTO = linear(module, x_BTI)
            for adapter, rows in self._plan.groups:
                layer = adapter.layers.get(name)
                if layer is None:
                    continue
                down_IR, up_RO = layer
                if rows is None:
                    out_BTO += x_BTI @ down_IR @ up_RO
                else:
                    out_BTO.index_add_(0, rows, x_BTI[rows] @ down_IR @ up_RO)
            return out_BTO

        return forward


def _noting(shapes: set[tuple[int, ...]]) -> Callable[[nn.Module, Any], None]:
    def note(_: nn.Module, inputs: Any) -> None:
        shapes.add(tuple(inputs[0].shape[:-1]))

    return note


def read_adapter(name: str, path: str, model: nn.Module, base: str) -> Adapter:
    """The adapter in folder `path`, for `model`, which was loaded from `base`.

    Raises AdapterRejected, one line, for a folder without an adapter, for an adapter of another
    base model (by its name, layers or shapes), and for kinds of adapters that are not served.
    """
    folder = Path(path)
    config = _read_config(folder, base)
    try:
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterRejected(f"{folder / _WEIGHTS}: cannot be read: {error}") from None
    modules = dict(model.named_modules())
    scale = float(config["lora_alpha"])
    scale /= math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    layers = {}
    for key in sorted(tensors):
        if not key.startswith(_PREFIX) or not key.endswith((_A, _B)):
            raise AdapterRejected(f"{folder}: {key} is not part of an adapter of linear layers")
    for layer in sorted({key[len(_PREFIX) : -len(_A)] for key in tensors}):
        module = modules.get(layer)
        down, up = tensors.get(f"{_PREFIX}{layer}{_A}"), tensors.get(f"{_PREFIX}{layer}{_B}")
        if not isinstance(module, nn.Linear) or down is None or up is None:
            raise AdapterRejected(
                f"{folder}: it adapts {layer}, which is not a linear layer of {base}: it was "
                "trained for another model"
            )
        shapes = (config["r"], module.in_features), (module.out_features, config["r"])
        if (tuple(down.shape), tuple(up.shape)) != shapes:
            raise AdapterRejected(
                f"{folder}: its tensors for {layer} have the shapes {list(down.shape)} and "
                f"{list(up.shape)}, and {base} needs {list(shapes[0])} and {list(shapes[1])}: it "
                "was trained for another model"
            )
        to: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
        layers[layer] = down.to(**to).T.contiguous(), (up * scale).to(**to).T.contiguous()
    if not layers:
        raise AdapterRejected(f"{folder / _WEIGHTS}: there is no adapter in it")
    return Adapter(name=name, path=path, layers=layers)


def _read_config(folder: Path, base: str) -> dict[str, Any]:
    file = folder / _CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterRejected(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterRejected(f"{file}: only adapters of peft_type LORA are served")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise AdapterRejected(f"{file}: {key} must be a positive number")
    other = next((key for key in _NOT_SERVED if config.get(key)), None)
    if other is None and config.get("bias") not in (None, "none"):
        other = "bias"
    if other is not None:
        raise AdapterRejected(f"{file}: {other} is set, which can only be served merged")
    named = config.get("base_model_name_or_path")
    if named and _identity(named) != _identity(base):
        raise AdapterRejected(f"{file}: it is an adapter of {named}, and this engine serves {base}")
    return config


def _identity(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model
