"""What a launch would do, as text; and that a dry run changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opd.cli.app import app
from opd.cluster.files import sglang_file
from opd.cluster.flag_check import REPOSITORY
from opd.cluster.plan import engine_overrides, make_plan
from opd.run.config import load, save
from tests.opd.cluster.examples import CONFIGS, EXPECTED, NOWHERE, dry_run, plan_of
from trainer.errors import ConfigError, StartupError


def test_there_are_examples_for_one_node_for_several_and_for_experts() -> None:
    assert {path.stem for path in CONFIGS} >= {"qwen3_4b", "qwen3_8b", "qwen3_30b_a3b"}
    plans = [plan_of(path) for path in CONFIGS]
    assert {plan.cluster.nodes for plan in plans} == {1, 2}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_of_an_example_is_the_text_on_file(config: Path) -> None:
    """To change the text: `python -m tests.opd.cluster.examples`, then read the difference."""
    on_file = (EXPECTED / f"{config.stem}.txt").read_text(encoding="utf-8")
    assert unwrapped(dry_run(config)) == unwrapped(on_file)


def unwrapped(text: str) -> str:
    """Without the line breaks of long commands: where they fall hangs on the paths' lengths."""
    return text.replace(" \\\n    ", " ")


def test_command_prints_the_plan_and_leaves_no_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["slime", "--config", str(REPOSITORY / "configs" / "qwen3_4b.toml"), "--dry-run"]
    words = [word for item in NOWHERE for word in ("--set", item)]
    result = CliRunner().invoke(app, [*arguments, "--run", str(run), *words])
    assert result.exit_code == 0, result.output
    assert (
        "flags NOT checked: not on this machine: cluster.slime_root /nowhere/slime" in result.output
    )
    assert (
        "node 0  trainer  trainer  trainer  trainer  policy 0  policy 1  frozen 0" in result.output
    )
    assert list(tmp_path.iterdir()) == []


def test_launch_without_slime_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    arguments = ["slime", "--config", str(REPOSITORY / "configs" / "qwen3_4b.toml")]
    words = [word for item in NOWHERE for word in ("--set", item)]
    result = CliRunner().invoke(app, [*arguments, "--run", str(tmp_path / "run"), *words])
    assert result.exit_code == 2
    assert "not on this machine: cluster.slime_root /nowhere/slime" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("schedule", "driver"),
    [("sync", "train.py"), ("step_off", "train_async.py"), ("async", "train_async.py")],
)
def test_the_schedule_chooses_the_driver(schedule: str, driver: str, tmp_path: Path) -> None:
    overrides = [*NOWHERE, f"trainer.schedule={schedule}"]
    overrides += ["trainer.steps_off=1"] if schedule == "step_off" else []
    plan = make_plan(REPOSITORY / "configs" / "qwen3_8b.toml", overrides, tmp_path / "run")
    assert f"/nowhere/slime/{driver}" in plan.commands.submit


def test_secrets_are_not_shown() -> None:
    config = REPOSITORY / "configs" / "qwen3_8b_two_nodes.toml"
    plan = plan_of(
        config,
        [
            *NOWHERE,
            "store.url=postgresql+asyncpg://hindsight:hunter2@db.internal/hindsight",
            "judge.base_url=https://judge.example/v1",
            "judge.model=big",
            "judge.api_key=sk-1234",
        ],
    )
    from opd.cluster.show import show

    text = show(plan)
    assert "hunter2" not in text
    assert "sk-1234" not in text
    assert "judge.base_url=ADDRESS" not in text


def test_engines_are_reached_where_they_said_they_are() -> None:
    plan = plan_of(REPOSITORY / "configs" / "qwen3_4b.toml")
    addresses = {"policy": "http://10.0.0.2:3001", "frozen": "http://10.0.0.2:3002"}
    assert engine_overrides(plan.config, addresses) == [
        *("--set", "policy.url=http://10.0.0.2:3001"),
        *("--set", "frozen.url=http://10.0.0.2:3002"),
        *("--set", "judge.base_url=http://10.0.0.2:3002/v1"),
    ]
    with pytest.raises(ConfigError, match=r"engines\.json: no address of frozen"):
        engine_overrides(plan.config, {"policy": "http://10.0.0.2:3001"})


def test_frozen_engines_of_a_node_get_ports_of_their_own() -> None:
    plan = plan_of(REPOSITORY / "configs" / "qwen3_30b_a3b.toml")
    models = json.loads(plan.files[plan.paths.sglang_yaml])["sglang"]
    assert [model["name"] for model in models] == ["policy", "frozen"]
    assert [model["update_weights"] for model in models] == [True, False]
    groups = [group for model in models for group in model["server_groups"]]
    assert sum(group["num_gpus"] for group in groups) == plan.layout.rollout_gpus
    ports = [group["overrides"]["port"] for group in models[1]["server_groups"]]
    assert len(set(ports)) == len(plan.layout.engines["frozen"])
    assert not any(15000 <= port < 20000 for port in ports)


def test_policy_engines_on_two_nodes_are_two_groups() -> None:
    """slime counts full nodes from a group's first engine: a group must not cross a node's end."""
    plan = plan_of(
        REPOSITORY / "configs" / "qwen3_30b_a3b.toml",
        [
            *NOWHERE,
            *("cluster.actor.gpus=4", "cluster.actor.expert_parallel=4"),
            *("cluster.policy.gpus=8", "cluster.frozen.gpus=4"),
        ],
    )
    policy = json.loads(plan.files[plan.paths.sglang_yaml])["sglang"][0]
    assert [group["num_gpus"] for group in policy["server_groups"]] == [4, 4]


def test_each_launch_of_a_run_has_a_folder_and_a_name_of_its_own(tmp_path: Path) -> None:
    from opd.cluster.paths import next_launch

    assert next_launch(tmp_path).launch.name == "launch-001"
    (tmp_path / "launch-001").mkdir()
    (tmp_path / "launch-010").mkdir()
    assert next_launch(tmp_path).launch.name == "launch-011"


TEACHERS = [
    "cluster.frozen.gpus=1",
    "cluster.teachers.math.gpus=1",
    "cluster.teachers.math.model=/models/math",
    "scoring.routes.sources.gsm8k=math",
]


def test_further_teachers_have_engines_of_their_own(tmp_path: Path) -> None:
    config = REPOSITORY / "configs" / "qwen3_8b.toml"
    plan = make_plan(config, [*NOWHERE, *TEACHERS], tmp_path / "run")
    assert [plan.layout.owner(gpu) for gpu in (6, 7)] == ["frozen 0", "teacher-math 0"]
    models = json.loads(sglang_file(plan.config, plan.layout))["sglang"]
    found = [(one["name"], one["model_path"], one["update_weights"]) for one in models]
    assert found[-1] == ("teacher-math", "/models/math", False)
    assert found[1][:2] == ("frozen", plan.config.model)
    addresses = {name: f"http://{name}" for name in plan.layout.engines}
    assert "scoring.teachers.math=http://teacher-math" in engine_overrides(plan.config, addresses)
    # Whichever of them scores a turn, scores its side samples.
    asked = ["trainer.objective={name = 'side_samples'}", "trainer.beta_kl=0.0"]
    plan = make_plan(config, [*NOWHERE, *TEACHERS, *asked], tmp_path / "other")
    save(plan.config, tmp_path / "config.toml")
    overrides = [word for word in engine_overrides(plan.config, addresses) if word != "--set"]
    assert load(tmp_path / "config.toml", overrides).scoring.teachers.keys() == {"math"}
    del addresses["teacher-math"]
    with pytest.raises(ConfigError, match="no address of teacher-math"):
        engine_overrides(plan.config, addresses)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teachers.math.embedded.model=/models/math"], "cluster.teachers"),
        ([*TEACHERS[:2], "cluster.teachers.math.gpus=1"], "teachers.math.model"),
        ([*TEACHERS, "scoring.routes.tools.run=code"], "no teacher is called 'code'"),
        ([*TEACHERS, "cluster.teachers.math.gpus=2"], "too many"),
    ],
)
def test_teachers_that_a_job_cannot_start_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    config = REPOSITORY / "configs" / "qwen3_8b.toml"
    with pytest.raises(StartupError, match=message):
        make_plan(config, [*NOWHERE, *overrides], tmp_path / "run")
