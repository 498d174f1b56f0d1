"""Runs of slime for tests: a resolved configuration, and slime's arguments for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli_w

from tests.records.new_store import new_store


def run_values(folder: Path, *, rollout_batch_size: int = 4, **sections: Any) -> dict[str, Any]:
    """What the rollout side reads of a resolved configuration; a store on a SQLite file."""
    handover = {"max_wait_s": 0.2, "poll_interval_s": 0.01, "store_patience_s": 5.0}
    values: dict[str, Any] = {
        "model": "/shared/models/policy",
        "seed": 0,
        "renderer": {"name": "qwen3"},
        "engine_client": {},
        "store": {"url": f"sqlite:///{folder / 'records.db'}"},
        "trainer": {
            "rollout_batch_size": rollout_batch_size,
            "epochs_per_batch": 1,
            "max_staleness": 4,
            "lease_ttl_s": 600.0,
        },
        "handover": handover,
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def slime_args(folder: Path, **changes: Any) -> SimpleNamespace:
    """slime's arguments of a run in `folder`, one GPU; `config.toml` is written unless it is
    there, and so is a store without rows.
    """
    new_store(folder / "records.db")
    path = folder / "config.toml"
    if not path.exists():
        path.write_text(tomli_w.dumps(run_values(folder)))
    values: dict[str, Any] = {
        "hindsight_config": str(path),
        "hindsight_needs": {"teacher": True, "reward": True, "compared": False, "top_k": 0},
        "rollout_global_dataset": True,
        "save": str(folder / "checkpoints"),
        "save_interval": 1,
        "num_rollout": 10,
        "n_samples_per_prompt": 1,
        "rollout_batch_size": 4,
        "use_dynamic_batch_size": True,
        "custom_convert_samples_to_train_data_path": "rollout_bridge.slime.rollout.convert_samples",
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**{**values, **changes})
