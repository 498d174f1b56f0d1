"""Whether a mixture of experts replays its routing in training, and why (ALGORITHMS 6.7)."""

from __future__ import annotations

from typing import Literal

from opd.run.config import RunConfig

RoutingReplay = Literal["none", "R2", "R3"]
"""No replay; the trainer's routing before the step; the engine's while it sampled."""

CLIPPED_FROM = 8
"""From this many steps on a batch, replay alone does not keep training stable."""


def replay_for(passes: int) -> RoutingReplay:
    """What the sources choose for this many steps on a batch."""
    if passes == 1:
        return "none"
    return "R2" if passes < 4 else "R3"


def routing_replay(config: RunConfig) -> tuple[RoutingReplay, str]:
    """What a launch with a mixture of experts does, and why in a few words."""
    assert config.cluster is not None
    asked = config.cluster.routing_replay
    if asked != "auto":
        return asked, "cluster.routing_replay"
    passes = config.trainer.epochs_per_batch
    why = f"{passes} {'step' if passes == 1 else 'steps'} on a batch"
    if passes >= CLIPPED_FROM:
        why += "; so many need a clip as well"
    return replay_for(passes), why


def routing_problem(config: RunConfig, *, is_moe: bool) -> str | None:
    """None, or in one line why the replay is impossible, and what to set."""
    assert config.cluster is not None
    if not is_moe and config.cluster.routing_replay in ("R2", "R3"):
        return (
            f"cluster.routing_replay = {config.cluster.routing_replay} replays the routing of a "
            "mixture of experts, and this model is not known to be one: set auto"
        )
    if not is_moe:
        return None
    replay, why = routing_replay(config)
    if replay == "R3" and config.rehearsal.enabled:
        return (
            f"routing replay R3 ({why}) needs the experts that the engine chose, and lessons are "
            "stored without them: set cluster.routing_replay = R2, or rehearsal.enabled = false"
        )
    if replay != "R3" and config.engine_client.routed_experts_topk:
        return (
            f"routing replay {replay} ({why}) does not use the experts that "
            "engine_client.routed_experts_topk records: set it to 0, or "
            "cluster.routing_replay = R3"
        )
    if replay == "R3" and not config.engine_client.routed_experts_topk:
        return (
            f"routing replay R3 ({why}) needs the experts that the engine chose: set "
            "engine_client.routed_experts_topk to what the model chooses for a token, or "
            "cluster.routing_replay = none"
        )
    return None
