"""Layouts that add up are placed; the others are refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.cluster.architecture import Architecture
from opd.cluster.config import ClusterConfig
from opd.cluster.layout import Layout, LayoutError, build_layout
from opd.cluster.show import draw
from opd.run import config as run_config
from tests.opd.cluster.examples import values


def layout(batch_size: int = 64, **changes: Any) -> Layout:
    cluster = ClusterConfig.model_validate(run_config.merge(values()["cluster"], changes))
    assert cluster.architecture is not None
    return build_layout(cluster, cluster.architecture, batch_size)


def test_gpus_go_to_the_trainer_first_then_to_the_engines_in_order() -> None:
    found = layout()
    assert [found.owner(gpu) for gpu in range(8)] == [
        *["trainer"] * 4,
        *("policy 0", "policy 1", "frozen 0", "frozen 1"),
    ]
    assert found.actor_shape == (1, 4)
    assert found.rollout_gpus == 4


def test_a_judge_of_its_own_comes_last() -> None:
    found = layout(
        actor={"gpus": 2},
        frozen={"gpus": 2},
        judge={"gpus": 2, "gpus_per_engine": 2, "model": "/j"},
    )
    assert draw(found).splitlines()[1].split("  ")[-2:] == ["judge 0", "judge 0"]


def test_two_nodes_are_drawn_as_two_rows() -> None:
    found = layout(
        nodes=2,
        ray={"head_ip": "10.0.0.1"},
        actor={"gpus": 8},
        policy={"gpus": 6, "gpus_per_engine": 2},
    )
    assert found.actor_shape == (1, 8)
    assert [line.split()[:2] for line in draw(found).splitlines()[1:]] == [
        ["node", "0"],
        ["node", "1"],
    ]
    assert {engine.node for engine in found.engines["policy"]} == {1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": {"gpus": 1}}, r"= 7 GPUs, but 1 x 8 = 8: 1 left over"),
        ({"policy": {"gpus": 4}}, r"= 10 GPUs, but 1 x 8 = 8: 2 too many"),
        (
            {"policy": {"gpus": 3, "gpus_per_engine": 2}, "frozen": {"gpus": 1}},
            r"policy\.gpus 3 is not a multiple of gpus_per_engine 2",
        ),
        ({"actor": {"tensor_parallel": 3}}, r"not a multiple of tensor 3 x pipeline 1 x context 1"),
        ({"actor": {"tensor_parallel": 3}}, r"does not divide gpus_per_node 8"),
        ({"actor": {"expert_parallel": 3}}, r"not a multiple of expert 3"),
        ({"actor": {"expert_parallel": 2}}, r"qwen3 has no experts"),
        (
            {"actor": {"pipeline_parallel": 8}},
            r"pipeline_parallel 8 does not divide the model's 36",
        ),
    ],
)
def test_layout_that_does_not_add_up_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        layout(**changes)


def test_engine_in_two_nodes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"engine on GPUs 6 to 9 would be in two nodes of 8"):
        layout(
            nodes=2,
            ray={"head_ip": "10.0.0.1"},
            actor={"gpus": 2},
            policy={"gpus": 12, "gpus_per_engine": 4},
            frozen={"gpus": 2},
        )


def test_trainer_over_one_node_must_fill_nodes() -> None:
    with pytest.raises(LayoutError, match=r"actor\.gpus 12: more than one node must be filled"):
        layout(nodes=2, ray={"head_ip": "10.0.0.1"}, actor={"gpus": 12})


def test_batch_must_reach_every_copy_of_the_model() -> None:
    with pytest.raises(LayoutError, match="rollout_batch_size 1 is less than the 2 copies"):
        layout(batch_size=1)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(LayoutError) as refused:
        layout(policy={"gpus": 3, "gpus_per_engine": 2}, actor={"tensor_parallel": 3})
    assert len(str(refused.value).splitlines()) >= 3


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    actor=st.integers(1, 32),
    policy=st.integers(1, 16),
    size=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_what_is_accepted_gives_every_gpu_to_exactly_one_in_one_node(
    nodes: int, per_node: int, actor: int, policy: int, size: int
) -> None:
    cluster = ClusterConfig.model_validate(
        {
            "nodes": nodes,
            "gpus_per_node": per_node,
            "ray": {"head_ip": "10.0.0.1"},
            "actor": {"gpus": actor},
            "policy": {"gpus": policy, "gpus_per_engine": size},
            "frozen": {"gpus": max(nodes * per_node - actor - policy, 1)},
        }
    )
    model: Architecture | None = None
    try:
        found = build_layout(cluster, model, batch_size=64)
    except LayoutError:
        return
    taken = list(range(actor))
    for engines in found.engines.values():
        for engine in engines:
            gpus = range(engine.first_gpu, engine.first_gpu + engine.gpus)
            assert {gpu // per_node for gpu in gpus} == {engine.node}
            taken += gpus
    assert taken == list(range(nodes * per_node))
