"""Whether the interfaces of this process's slime carry what is handed over.

slime silently drops train-data keys that it does not know, and its interfaces change. So the
installed source is searched, without importing it, for what is relied on; missing parts are named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

CHECKED_COMMIT = "624b824a"

ROLLOUT_KEYS = (
    "tokens",
    "response_lengths",
    "rewards",
    "truncated",
    "loss_masks",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "rollout_log_probs",
    "rollout_routed_experts",
    "prompt",
    "raw_reward",
)
"""Train-data keys that the convert hook returns."""

_RELIED_ON: Mapping[str, Iterable[str]] = {
    "slime.ray.rollout": (
        *(f'"{key}"' for key in ROLLOUT_KEYS),
        "custom_convert_samples_to_train_data_func(self.args, samples)",
        "self.data_source.save(rollout_id)",
        "self.data_source.load(rollout_id)",
        "global_batch_size=self.args.global_batch_size",
        "args.sglang_model_routers",
    ),
    "slime.utils.types": ("rollout_id:", "loss_mask:", "rollout_log_probs:", "metadata:"),
    "slime.rollout.base_types": ("class RolloutFnTrainOutput", "class RolloutFnEvalOutput"),
    "slime.backends.megatron_utils.actor": ("update_weight_start_version",),
}


class UnknownSlimeError(RuntimeError):
    """The installed slime lacks something that the hand-over of samples needs."""


def check_slime() -> None:
    """Raises UnknownSlimeError for a slime that would lose samples or scores."""
    missing = [
        f"{text} in {module}"
        for module, texts in _RELIED_ON.items()
        for text in _absent(module, texts)
    ]
    if missing:
        raise UnknownSlimeError(
            f"this version of slime is not supported: it lacks {', '.join(missing)}; "
            f"use slime at {CHECKED_COMMIT}"
        )


def _absent(module: str, texts: Iterable[str]) -> list[str]:
    path = _source(module)
    if path is None:
        return ["the module itself"]
    source = path.read_text(encoding="utf-8")
    return [text for text in texts if text not in source]


def _source(module: str) -> Path | None:
    """Path of a module's source; its parent packages are found, but only `slime` is imported."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below).with_suffix(".py")
        if path.is_file():
            return path
    return None
