"""The configuration of a cluster: what follows from the rest, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.cluster.flag_check import REPOSITORY
from opd.cluster.launching.prepare import resolve
from opd.cluster.plan import make_plan
from opd.cluster.show import describe
from opd.run.config import RunConfig
from tests.opd.cluster.examples import NOWHERE, plan_of
from trainer.errors import ConfigError, StartupError

CONFIGS = REPOSITORY / "configs"
ONE = CONFIGS / "qwen3_8b.toml"
TWO = REPOSITORY / "configs" / "qwen3_8b_two_nodes.toml"
MOE = REPOSITORY / "configs" / "qwen3_30b_a3b.toml"
RECORDED = "engine_client.routed_experts_topk=8"


def config(file: Path, *overrides: str) -> RunConfig:
    return resolve(file, list(overrides), Path("/shared/runs/x"))[0]


def test_one_node_keeps_its_store_in_the_run_folder() -> None:
    assert config(ONE).store.url == "sqlite:////shared/runs/x/records.db"


def test_several_nodes_need_postgresql() -> None:
    with pytest.raises(ConfigError, match=r"store\.url: .* cluster\.nodes is 2; use postgresql"):
        config(TWO, "store.url=sqlite:////shared/records.db")


def test_several_nodes_need_an_address() -> None:
    with pytest.raises(ConfigError, match=r"ray\.head_ip: 2 nodes must find this one"):
        config(ONE, "cluster.nodes=2")


def test_endpoint_listens_on_loopback_unless_told() -> None:
    assert config(ONE).proxy.host == "127.0.0.1"


def test_context_lengths_come_from_the_model_or_from_the_engines_setting() -> None:
    found = config(ONE)
    assert (found.proxy.context_length, found.scoring.context_length) == (40960, 40960)
    assert found.judge.max_prompt_tokens + found.judge.max_tokens == 40960
    found = config(ONE, "cluster.frozen.server_args={context_length = 16384}")
    assert (found.proxy.context_length, found.scoring.context_length) == (40960, 16384)
    assert found.judge.max_prompt_tokens + found.judge.max_tokens == 16384


def test_scores_must_be_of_the_frozen_weights() -> None:
    assert config(ONE).scoring.expected_version == "frozen"


def test_judge_elsewhere_is_left_as_it_is() -> None:
    found = config(ONE, "judge.base_url=https://judge.example/v1", "judge.model=big")
    assert (found.judge.base_url, found.judge.model) == ("https://judge.example/v1", "big")


def test_judge_of_its_own_is_asked_by_its_name() -> None:
    found = config(
        ONE,
        "cluster.judge={model = '/shared/models/judge', gpus = 1}",
        "cluster.judge.server_args={context_length = 9000}",
    )
    assert found.judge.model == "/shared/models/judge"
    assert found.judge.max_prompt_tokens + found.judge.max_tokens == 9000


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("cluster.policy.gpu=2", r"cluster\.policy\.gpu: unknown key; did you mean 'gpus'"),
        ("cluster.sglang_root=/x", r"cluster\.sglang_root: unknown key; did you mean 'slime_root'"),
        ("clustr.nodes=2", r"clustr: unknown key; did you mean 'cluster'"),
        ("handover.max_wait=3", r"handover\.max_wait: unknown key; did you mean 'max_wait_s'"),
        ("policy.url=http://x", r"policy: the job starts its engines itself"),
        ("trainer.dtype=float32", r"trainer\.dtype: slime computes in bfloat16; remove it"),
        ("trainer.lora.rank=4", r"slime trains all weights"),
        ("trainer.teacher.kind=ema", r"needs a second model in the trainer"),
        ("model=Qwen/Qwen3-4B", r"absolute path of a folder"),
        ("judge.model=big", r"judge\.model: set judge\.base_url too"),
        ("engine_client.routed_experts_topk=8", r"the model chooses 0 experts"),
        ("cluster.ray.port=12000", r"port 12000: Ray's workers use the ports 10002 to 19999"),
        ("cluster.frozen_base_port=15000", r"choose one from 20000 up"),
    ],
)
def test_refusals_name_the_key_and_what_to_do(override: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        make_plan(ONE, [override], Path("/shared/runs/x"))


def test_a_batch_smaller_than_the_copies_of_the_model_is_refused() -> None:
    smaller = ["trainer.rollout_batch_size=1", "rehearsal.enabled=false"]
    with pytest.raises(StartupError, match=r"less than the 2 copies of the model"):
        make_plan(CONFIGS / "qwen3_4b.toml", smaller, Path("/shared/runs/x"))


def test_experts_that_are_replayed_are_those_that_the_model_chooses() -> None:
    assert config(MOE, "engine_client.routed_experts_topk=8").cluster is not None
    with pytest.raises(ConfigError, match=r"the model chooses 8 experts for a token; set 0 or 8"):
        config(MOE, "engine_client.routed_experts_topk=4")


def test_renderer_is_named(tmp_path: Path) -> None:
    text = ONE.read_text().replace('[renderer]\nname = "qwen3"\n', "")
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"renderer\.name"):
        config(tmp_path / "c.toml")


def test_file_without_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('model = "/m"\n')
    with pytest.raises(ConfigError, match=r"no section \[cluster\]"):
        config(tmp_path / "c.toml")


def test_run_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    from opd.run import config as run_config

    overrides = ["store.url=sqlite:////shared/records.db"]
    first = make_plan(ONE, overrides, tmp_path)
    run_config.save(first.config, first.paths.config)
    assert make_plan(ONE, overrides, tmp_path).config == first.config
    with pytest.raises(ConfigError, match=r"model: .* was created with another one"):
        make_plan(ONE, [*overrides, "model=/shared/models/other"], tmp_path)


def test_checkpoint_of_the_run_is_gone_on_from(tmp_path: Path) -> None:
    assert not make_plan(ONE, [], tmp_path).resumes
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("19")
    assert make_plan(ONE, [], tmp_path).resumes


@pytest.mark.parametrize(
    ("overrides", "flag", "said"),
    [
        ([], None, "routing replay: none (1 step on a batch)"),
        (
            ["cluster.routing_replay=R2"],
            "--use-routing-replay",
            "routing replay: R2 (cluster.routing_replay)",
        ),
        (
            ["trainer.epochs_per_batch=2"],
            "--use-routing-replay",
            "routing replay: R2 (2 steps on a batch)",
        ),
        (
            ["trainer.epochs_per_batch=4", RECORDED],
            "--use-rollout-routing-replay",
            "routing replay: R3 (4 steps on a batch)",
        ),
        (
            ["trainer.epochs_per_batch=8", RECORDED],
            "--use-rollout-routing-replay",
            "routing replay: R3 (8 steps on a batch; so many need a clip as well)",
        ),
        (
            ["cluster.routing_replay=R3", RECORDED],
            "--use-rollout-routing-replay",
            "routing replay: R3 (cluster.routing_replay)",
        ),
    ],
)
def test_a_dry_run_says_which_routing_is_replayed_and_why(
    overrides: list[str], flag: str | None, said: str
) -> None:
    plan = plan_of(MOE, [*NOWHERE, *overrides])
    assert said in describe(plan)
    flags = {one[0] for one in plan.sections["samples"] if "routing-replay" in one[0]}
    assert flags == ({flag} if flag else set())
    assert "routing replay" not in describe(plan_of(ONE))


def test_the_engines_routing_cannot_be_replayed_where_nobody_recorded_it() -> None:
    with pytest.raises(ConfigError, match=r"R3 .* needs the experts that the engine chose"):
        plan_of(MOE, [*NOWHERE, "cluster.routing_replay=R3"])
    with pytest.raises(ConfigError, match=r"R2 .* does not use the experts"):
        plan_of(MOE, [*NOWHERE, "cluster.routing_replay=R2", RECORDED])
    for steps, replay in ((1, "none"), (2, "R2")):
        asked = [*NOWHERE, f"trainer.epochs_per_batch={steps}", RECORDED]
        with pytest.raises(ConfigError, match=rf"{replay} .* does not use the experts"):
            plan_of(MOE, asked)
    with pytest.raises(ConfigError, match="not known to be one"):
        plan_of(ONE, [*NOWHERE, "cluster.routing_replay=R2"])
