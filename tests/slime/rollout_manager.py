"""A real RolloutManager Ray actor and router with zero engines, driven as slime's scripts do.

    python -m tests.slime.rollout_manager RUN_FOLDER START_VERSION COMMAND...

COMMANDs: load:N generate:N save:N, in order. Each reply is JSON on a line after `REPLY `.
Megatron's part is played by the caller: nothing is trained here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Ray lowers the priority of its workers, which starves them on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from slime.backends.sglang_utils.arguments import add_sglang_router_arguments
from slime.ray.placement_group import create_rollout_manager
from slime.utils.data import process_rollout_data

PLUGIN = "rollout_bridge.slime.rollout"
DATA_PARALLEL = 2


def slime_args(run: Path, start_version: int) -> argparse.Namespace:
    """What slime's parser and the custom configuration give for this run, as far as it is read."""
    parser = argparse.ArgumentParser()
    add_sglang_router_arguments(parser)
    args = parser.parse_args([])
    values: dict[str, Any] = {
        "actor_num_gpus_per_node": DATA_PARALLEL,
        "actor_num_nodes": 1,
        "advantage_estimator": "grpo",
        "balance_by_flops": False,
        "balance_data": False,
        "check_weight_update_equal": False,
        "ci_test": False,
        "colocate": False,
        "context_parallel_size": 1,
        "custom_convert_samples_to_train_data_path": f"{PLUGIN}.convert_samples",
        "custom_eval_rollout_log_function_path": None,
        "custom_reward_post_process_path": None,
        "custom_rollout_log_function_path": f"{PLUGIN}.log_rollout",
        "data_source_path": f"{PLUGIN}.HindsightDataSource",
        "debug_rollout_only": False,
        "debug_train_only": False,
        "eval_function_path": f"{PLUGIN}.generate_rollout",
        "global_batch_size": 4,
        "hf_checkpoint": "none",
        "hindsight_config": str(run / "config.toml"),
        "hindsight_needs": {"teacher": True, "reward": True, "compared": False, "top_k": 0},
        "load": None,
        "load_debug_rollout_data": None,
        "max_tokens_per_gpu": 64,
        "micro_batch_size": 1,
        "n_samples_per_prompt": 1,
        "num_gpus_per_node": 8,
        "num_rollout": 10,
        "offload_rollout": False,
        "pipeline_model_parallel_size": 1,
        "prefill_num_servers": None,
        "rollout_batch_size": 4,
        "rollout_data_transport": "object-store",
        "rollout_external": False,
        "rollout_function_path": f"{PLUGIN}.generate_rollout",
        "rollout_global_dataset": True,
        "rollout_num_gpus": 0,
        "rollout_num_gpus_per_engine": 1,
        "save": str(run / "checkpoints"),
        "save_debug_rollout_data": None,
        "save_interval": 1,
        "sglang_config": None,
        "sglang_dp_size": 1,
        "sglang_server_concurrency": 4,
        "tensor_model_parallel_size": 1,
        "update_weight_start_version": start_version,
        "use_distributed_post": False,
        "use_dynamic_batch_size": True,
        "use_fault_tolerance": False,
        "use_tensorboard": False,
        "use_wandb": False,
        "wandb_always_use_train_step": False,
    }
    args.__dict__.update(values)
    return args


def main() -> None:
    run, start_version = Path(sys.argv[1]), int(sys.argv[2])
    args = slime_args(run, start_version)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    manager, _ = create_rollout_manager(args, None)
    layout = {
        "dp_size": DATA_PARALLEL,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    ray.get(manager.set_train_parallel_config.remote(layout))
    for command in sys.argv[3:]:
        name, _, number = command.partition(":")
        result = ray.get(getattr(manager, name).remote(int(number)))
        reply: dict[str, Any] = {"command": command}
        if name == "generate":
            reply["ranks"] = [_rank(args, result, rank) for rank in range(DATA_PARALLEL)]
        print("REPLY", json.dumps(reply), flush=True)
    ray.shutdown()


def _rank(args: argparse.Namespace, refs: Any, rank: int) -> dict[str, Any]:
    """What slime's trainer gets on one data rank."""
    data = process_rollout_data(args, refs, rank, DATA_PARALLEL)
    return {
        "turns": [[turn.sample.turn_id for turn in carrier.turns] for carrier in data["prompt"]],
        "spans": [
            [[turn.start, turn.end, turn.version_gap] for turn in carrier.turns]
            for carrier in data["prompt"]
        ],
        "tokens": [tokens.tolist() for tokens in data["tokens"]],
        "loss_masks": [mask.tolist() for mask in data["loss_masks"]],
        "rollout_log_probs": [values.tolist() for values in data["rollout_log_probs"]],
        "rollout_ids": list(data["rollout_ids"]),
        "rollout_mask_sums": data["rollout_mask_sums"].tolist(),
        "global_batch_sizes": data["global_batch_sizes"],
        "response_lengths": list(data["response_lengths"]),
    }


if __name__ == "__main__":
    main()
