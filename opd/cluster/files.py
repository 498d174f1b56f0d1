"""The files that slime reads: the engines, and where our own settings are.

They are written as JSON, which is YAML.
"""

from __future__ import annotations

import json
from typing import Any

import tomli_w
from sqlalchemy.engine import make_url

from opd.cluster.config import ClusterConfig, EngineGroup, ModelEngines
from opd.cluster.going_back import GoingBack
from opd.cluster.launching.prepare import FROZEN_VERSION
from opd.cluster.layout import EnginePlacement, Layout, engine_groups
from opd.cluster.paths import Paths
from opd.run.config import RunConfig
from rollout_bridge.slime.settings import Rollback
from trainer.config import TrainerConfig
from trainer.slime.plan import sample_needs

PORTS_PER_ENGINE = 64
"""The server, NCCL, and what SGLang derives from its rendezvous address."""


def sglang_file(config: RunConfig, layout: Layout) -> str:
    """slime's --sglang-config: the policy first, then the engines that keep their weights."""
    cluster = config.cluster
    assert cluster is not None
    groups = engine_groups(cluster)
    models = []
    for name, group in groups.items():
        model = group.model if isinstance(group, ModelEngines) else config.model
        models.append(
            {
                "name": name,
                "model_path": model,
                "update_weights": name == "policy",
                "num_gpus_per_engine": group.gpus_per_engine,
                "server_groups": _server_groups(name, group, cluster, layout),
            }
        )
    return _json({"sglang": models})


def custom_file(
    paths: Paths, trainer: TrainerConfig, start_version: int, back: GoingBack | None
) -> str:
    """slime's --custom-config-path: where the hooks find the run's configuration, what its
    objective needs of a turn, the number from which slime numbers new weights, so that no name is
    used twice, and the version that the job goes back to, if it does.
    """
    values: dict[str, Any] = {
        "hindsight_config": str(paths.config),
        "hindsight_needs": sample_needs(trainer).model_dump(exclude_defaults=True),
        "update_weight_start_version": start_version,
    }
    if back is not None:
        rollback = Rollback(restores=back.restores, parent=back.parent)
        values["hindsight_rollback"] = rollback.model_dump()
    return _json(values)


def config_text(config: RunConfig) -> str:
    """The resolved configuration without defaults and without secrets, to be shown."""
    values: dict[str, Any] = config.model_dump(
        mode="json", exclude_none=True, exclude_defaults=True
    )
    values["store"]["url"] = make_url(config.store.url).render_as_string(hide_password=True)
    return tomli_w.dumps(values)


def _server_groups(
    name: str, group: EngineGroup, cluster: ClusterConfig, layout: Layout
) -> list[dict[str, Any]]:
    own = {"mem_fraction_static": group.mem_fraction, **group.server_args}
    if name == "policy":
        # One group per node: slime finds the address of a group's engines by counting full nodes
        # from its first engine, which is wrong for a group that starts in the middle of one.
        by_node: dict[int, list[EnginePlacement]] = {}
        for engine in layout.engines[name]:
            by_node.setdefault(engine.node, []).append(engine)
        return [
            _group(sum(engine.gpus for engine in engines), group, own)
            for engines in by_node.values()
        ]
    # One group per engine, each with its own ports: slime looks for free ports from 15000 up again
    # for every model, before the previous model's engines have taken theirs.
    return [
        _group(
            engine.gpus,
            group,
            {"weight_version": FROZEN_VERSION, **own, **_ports(engine, cluster)},
        )
        for engine in layout.engines[name]
    ]


def _ports(engine: EnginePlacement, cluster: ClusterConfig) -> dict[str, Any]:
    """Ports by the engine's first GPU in its node: no two engines of a node share it."""
    first = cluster.frozen_base_port + PORTS_PER_ENGINE * (engine.first_gpu % cluster.gpus_per_node)
    return {"port": first, "nccl_port": first + 1, "dist_init_addr": f"127.0.0.1:{first + 2}"}


def _group(gpus: int, group: EngineGroup, overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "worker_type": "regular",
        "num_gpus": gpus,
        "num_gpus_per_engine": group.gpus_per_engine,
        "overrides": overrides,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
