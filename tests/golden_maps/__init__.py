"""From golden files to this project's public functions, a module per family."""

from __future__ import annotations

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
)
from tests.golden_maps.check import GoldenMap

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
}
"""By the name of the golden file that a map was written for."""


def find_map(path: Path, meta: Mapping[str, Any]) -> GoldenMap:
    """The map of a file: by its name, by a name that begins with a known one, or by the function
    that its meta names. Raises ValueError where none fits.
    """
    if path.stem in MAPS:
        return MAPS[path.stem]
    starts = sorted((name for name in MAPS if path.stem.startswith(name)), key=len)
    if starts:
        return MAPS[starts[-1]]
    function = str(meta.get("function", ""))
    known = [name for name in MAPS if name.split("_", 1)[1] in function]
    if len(known) == 1:
        return MAPS[known[0]]
    raise ValueError(f"{path.name}: no map for this file; known: {', '.join(sorted(MAPS))}")
