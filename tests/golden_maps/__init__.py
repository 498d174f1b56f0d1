"""From golden files to this project's public functions, a module per family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden_maps import (
    async_opd,
    forward_kl,
    kl,
    opd_modes,
    overlap_topk,
    policy_losses,
    rewards,
    rollout_correction,
    self_distillation,
    tail_kl,
    turn_losses,
    turn_rewards,
)
from tests.golden_maps.check import GoldenMap
from tests.trainer.golden import FOLDER, MORE_FOLDER

MAPS: Mapping[str, GoldenMap] = {
    **async_opd.MAPS,
    **forward_kl.MAPS,
    **kl.MAPS,
    **opd_modes.MAPS,
    **overlap_topk.MAPS,
    **policy_losses.MAPS,
    **rewards.MAPS,
    **rollout_correction.MAPS,
    **self_distillation.MAPS,
    **tail_kl.MAPS,
    **turn_losses.MAPS,
    **turn_rewards.MAPS,
}
"""By the name of the golden file that a map was written for."""


def file_of(name: str) -> Path:
    """The file of that name."""
    given = FOLDER / f"{name}.json"
    return given if given.exists() else MORE_FOLDER / f"{name}.json"


def find_map(path: Path, meta: Mapping[str, Any]) -> GoldenMap:
    """The map of a file: by the longest known name in its own, or by the source and function in its
    meta, as a file of this repository has them. Raises ValueError where none fits.
    """
    named = sorted((name for name in MAPS if name in path.stem), key=len)
    if named:
        return MAPS[named[-1]]
    origin = (meta.get("source"), meta.get("function"))
    for name in MAPS:
        known = json.loads(file_of(name).read_text())["meta"]
        if origin == (known.get("source"), known.get("function")):
            return MAPS[name]
    raise ValueError(f"{path.name}: no map for this file; known: {', '.join(sorted(MAPS))}")
