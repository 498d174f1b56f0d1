"""docs/cluster.md, against the launch: what its table calls refused is refused, the rest is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from opd.cluster.flag_check import REPOSITORY
from opd.cluster.launching.prepare import resolve
from opd.cluster.plan import make_plan
from opd.cluster.show import describe
from opd.run.recipe import recipe
from trainer.errors import StartupError

RUN = Path("/shared/runs/x")
ONE = REPOSITORY / "configs" / "qwen3_8b.toml"
TEACHER = "trainer.teacher.kind=frozen"
REWARDS = ("judge.reward=verdict", "trainer.objective.reward_coef=1.0")
OUTCOMES = ("judge.reward=outcome", "trainer.objective.reward_outcome=only")
REFUSED: dict[str, tuple[str, ...]] = {
    "trainer.lora": ("trainer.lora.rank=8",),
    "trainer.teacher.kind": (TEACHER,),
    "overlap_topk": (
        "trainer.objective={name = 'overlap_topk'}",
        TEACHER,
        "judge.selection=shortest_first",
        "trainer.beta_kl=0.0",
    ),
    "self_distillation": (
        "trainer.objective={name = 'self_distillation'}",
        TEACHER,
        "trainer.beta_kl=0.0",
    ),
    'support_of = "student"': (
        "trainer.objective={name = 'self_distillation', support_of = 'student'}",
        TEACHER,
        "trainer.beta_kl=0.0",
    ),
    'direction = "forward"': (
        "trainer.objective={name = 'side_samples', direction = 'forward'}",
        TEACHER,
        "trainer.beta_kl=0.0",
    ),
    'objective.surrogate = "m2po"': (
        "trainer.objective.surrogate=m2po",
        "trainer.correction.mode=bypass",
    ),
    "correction.batch_normalize": ("trainer.correction.batch_normalize=true",),
    "objective.engine_cap": (
        "trainer.objective={surrogate = 'decoupled', engine_cap = 2.0}",
        "trainer.correction.importance_level=none",
    ),
    "trainer.replay_times": ("trainer.replay_times=2",),
    "trainer.noise_floor_factor": ("trainer.noise_floor_factor=5.0",),
    'trainer.pause_mode = "in_place"': ("trainer.pause_mode=in_place",),
}
"""What the table names -> overrides that ask for it."""


def named() -> list[str]:
    """The code in the table's first column, in its order."""
    text = (REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8")
    table = text.split("| setting | why slime cannot do it |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [one for cell in cells for one in re.findall(r"`([^`]+)`", cell)]


def test_the_table_names_what_is_tried_here() -> None:
    # The last one is tried with a model of experts, below.
    assert named() == [*REFUSED, 'cluster.routing_replay = "R3"']


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_table_names_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match="slime"):
        make_plan(ONE, list(REFUSED[name]), RUN)


@pytest.mark.parametrize(
    "overrides",
    [
        (*REWARDS, "trainer.beta_kl=0.0", "trainer.objective.reward_kl_coef=0.1"),
        (
            *REWARDS,
            "trainer.objective.length_penalty=uniform",
            "trainer.objective.length_warmup_steps=3",
        ),
        (
            *OUTCOMES,
            "verifier.source=my_checks:booked",
            "verifier.continuations=4",
            "trainer.objective.reward_coef=1.0",
            "trainer.objective.reward_baseline=process",
        ),
    ],
)
def test_rewards_of_every_kind_are_not_refused(overrides: tuple[str, ...]) -> None:
    flags = make_plan(ONE, list(overrides), RUN).sections["objective"]
    asks_start = any("reward_kl_coef" in one for one in overrides)
    assert asks_start <= (("--use-kl-loss",) in flags)


@pytest.mark.parametrize(
    ("objective", "needs"),
    [
        ("{name = 'side_samples', samples = 6}", ("policy", 6)),
        ("{name = 'sparse_kl', topk = 5}", ("policy_top", 5)),
    ],
)
def test_side_samples_are_not_refused(objective: str, needs: tuple[str, int]) -> None:
    plan = make_plan(ONE, [f"trainer.objective={objective}", "trainer.beta_kl=0.0"], RUN)
    told = json.loads(plan.files[plan.paths.custom_yaml])["hindsight_needs"]
    assert (told["side_source"], told["side_samples"]) == needs
    line = f"side samples: {needs[1]} per position, by the policy's engines when a turn is scored"
    assert line in describe(plan)


def test_several_steps_on_a_batch_are_not_refused() -> None:
    plan = make_plan(ONE, ["trainer.epochs_per_batch=4", "trainer.warmup_steps=3"], RUN)
    assert ("--lr-warmup-iters", "12") in plan.sections["optimiser"]
    assert "steps on a batch: 4" in describe(plan)


def test_the_bound_of_the_calibration_is_the_clusters() -> None:
    config = resolve(ONE, ["cluster.calibration_bound=0.3"], RUN)[0]
    assert config.cluster is not None
    assert config.cluster.calibration_bound == 0.3
    with pytest.raises(StartupError, match=r"set cluster\.calibration_bound"):
        make_plan(ONE, ["trainer.calibration_bound=0.3"], RUN)


def test_lessons_are_not_refused_and_make_slime_take_one_step_after_another() -> None:
    asked = ["rehearsal.enabled=true", "trainer.schedule=async", "trainer.lesson_hold_weight=2.0"]
    plan = make_plan(ONE, asked, RUN)
    assert any(word.endswith("/train.py") for word in plan.commands.submit)
    assert {flag[0] for flag in plan.sections["objective"]} >= {
        "--rollout-data-postprocess-path",
        "--custom-megatron-before-train-step-hook-path",
    }
    assert "lessons: while a hint is practised" in describe(plan)
    plain = make_plan(ONE, ["trainer.schedule=async"], RUN)
    assert any(word.endswith("/train_async.py") for word in plain.commands.submit)
    assert "lessons" not in describe(plain)


def test_lessons_with_the_engines_routing_are_refused() -> None:
    moe = REPOSITORY / "configs" / "qwen3_30b_a3b.toml"
    asked = ["rehearsal.enabled=true", "trainer.epochs_per_batch=4"]
    with pytest.raises(StartupError, match=r"set cluster\.routing_replay = R2"):
        make_plan(moe, [*asked, "engine_client.routed_experts_topk=8"], RUN)
    plan = make_plan(moe, [*asked, "cluster.routing_replay=R2"], RUN)
    assert "routing replay: R2" in describe(plan)


def test_curves_go_where_the_run_asks() -> None:
    flags = make_plan(ONE, ["trainer.wandb=hindsight"], RUN).sections["samples"]
    assert ("--wandb-project", "hindsight") in flags
    assert ("--wandb-group", RUN.name) in flags
    assert ("--use-wandb",) not in make_plan(ONE, [], RUN).sections["samples"]


def test_the_first_example_is_the_recipe_of_serve_for_full_weights() -> None:
    config, model, _ = resolve(REPOSITORY / "configs" / "qwen3_4b.toml", [], RUN)
    assert model is not None
    wanted = recipe(model.hidden_size, full_weights=True)
    for section, values in wanted.items():
        found = getattr(config, section).model_dump()
        for key, value in values.items():
            shown = {name: found[key][name] for name in value} if key == "objective" else found[key]
            assert shown == value, f"{section}.{key}"
