"""Advice on rollout correction follows a run's figures and says only what the run lacks."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opd.cli.app import app
from opd.cluster.config import ClusterConfig
from opd.commands.advise import _REMEDIES, Advice, advice
from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.defaults import single_machine
from tests.trainer.tiny import save_model
from trainer.objectives.rollout_correction import settings as correction_settings

REPOSITORY = Path(__file__).parents[3]
FRESH = {
    "rollout_corr/kl_fresh": 1e-6,
    "rollout_corr/kl": 1e-6,
    "staleness_max": 0,
    "skipped": None,
}


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict[str, Any]:
    model = save_model(tmp_path_factory.mktemp("model"))
    made = single_machine(str(model), tmp_path_factory.mktemp("runs") / "run")
    return made | {"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "none"}}


def config(values: dict[str, Any], **trainer: Any) -> RunConfig:
    objective = {"name": "hindsight_opd"}
    changed = values.get("trainer", {}) | {"objective": objective} | trainer
    return run_config.build(values | {"trainer": changed, "rehearsal": {"enabled": False}})


def told(run: RunConfig, *rows: dict[str, Any], is_mixture: bool = False) -> dict[str, Advice]:
    found = advice(run, [FRESH | row for row in rows], is_mixture=is_mixture)
    return {one.question: one for one in found}


def test_a_run_that_agrees_with_its_engine_and_is_never_stale_needs_nothing(values) -> None:
    found = told(config(values), {}, {})
    assert found["Do engine and trainer compute alike?"].choice.startswith("they do")
    assert found["Do samples of older weights train?"].choice.startswith("no")
    assert not any(one.set_these for one in found.values())
    assert len(found) == 3


def test_an_engine_with_other_arithmetic_needs_token_weights_unless_they_are_on(values) -> None:
    question, row = "Do engine and trainer compute alike?", {"rollout_corr/kl_fresh": -0.02}
    plain = config(values, correction={"importance_level": "none"})
    assert told(plain, {}, row)[question].set_these == ('trainer.correction.preset = "token_is"',)
    assert "0.02" in told(plain, {}, row)[question].seen
    assert told(config(values), row)[question].set_these == ()


def test_without_fresh_tokens_agreement_cannot_be_told(values) -> None:
    found = told(config(values), {"rollout_corr/kl_fresh": None})
    assert "unknown" in found["Do engine and trainer compute alike?"].choice


def test_older_samples_need_decoupled_ppo_unless_it_is_on(values) -> None:
    question, row = "Do samples of older weights train?", {"staleness_max": 3}
    found = told(config(values), row)[question]
    assert 'trainer.objective.surrogate = "decoupled"' in found.set_these
    on = config(
        values,
        objective={"name": "hindsight_opd", "surrogate": "decoupled"},
        correction={"importance_level": "none"},
    )
    assert told(on, row)[question].set_these == ()


@pytest.mark.parametrize("correction", [{}, {"importance_level": "none"}, {"preset": "geo_rs"}])
def test_what_it_says_to_set_fits_together_and_leaves_nothing_to_say(values, correction) -> None:
    row = {"staleness_max": 3, "rollout_corr/kl_fresh": 0.02}
    run = config(values, correction=correction)
    lines = [line for one in told(run, row).values() for line in one.set_these]
    assert len(lines) == 5
    wanted = tomllib.loads("\n".join(lines))["trainer"]
    wanted["objective"]["name"] = "hindsight_opd"
    changed = config(values, **wanted)
    assert changed.trainer.objective.needs_sampling_weights
    assert not any(one.set_these for one in told(changed, row).values())


def test_age_and_arithmetic_together_need_a_ratio_each(values) -> None:
    """TIS beside decoupled PPO, as the source has it, unless engine and trainer agree."""
    question, row = "Do samples of older weights train?", {"staleness_max": 3}
    cap = "trainer.objective.engine_cap = 2.0"
    apart = row | {"rollout_corr/kl_fresh": 0.02}
    assert cap in told(config(values), apart)[question].set_these
    assert cap not in told(config(values), row)[question].set_these
    objective: dict[str, Any] = {"name": "hindsight_opd", "surrogate": "decoupled"}
    on = {"correction": {"importance_level": "none"}}
    assert told(config(values, objective=objective, **on), apart)[question].set_these == (cap,)
    capped = config(values, objective=objective | {"engine_cap": 4.0}, **on)
    assert told(capped, apart)[question].set_these == ()
    other = config(values, objective=objective | {"surrogate": "a3po"}, **on)
    assert told(other, apart)[question].set_these == ()


def test_slime_is_not_told_to_set_what_it_refuses(values) -> None:
    example = tomllib.loads((REPOSITORY / "configs" / "qwen3_4b.toml").read_text())
    cluster = ClusterConfig.model_validate(example["cluster"])
    run = config(values).model_copy(update={"cluster": cluster})
    apart = {"staleness_max": 3, "rollout_corr/kl_fresh": 0.02}
    found = told(run, apart)["Do samples of older weights train?"]
    assert "slime keeps no earlier weights" in found.choice
    assert not any("engine_cap" in line for line in found.set_these)


def test_generation_that_runs_ahead_is_limited_unless_it_is(values) -> None:
    question, row = "Is generation kept from running ahead?", {"staleness_max": 3}
    assert question not in told(config(values), {})
    free = told(config(values, max_staleness=6), row)[question]
    assert free.set_these == ('trainer.schedule = "step_off"', "trainer.steps_off = 4")
    assert "trainer.max_staleness is 6" in free.seen
    tight = told(config(values, max_staleness=2), row)[question]
    assert tight.set_these[1] == "trainer.steps_off = 2"
    held = {"schedule": "step_off", "steps_off": 3}
    assert told(config(values, **held), row)[question].set_these == ()
    far = {"schedule": "step_off", "steps_off": 9, "max_staleness": 9}
    assert told(config(values, **far), row)[question].set_these == ("trainer.steps_off = 4",)


def test_a_mixture_replays_its_routing_by_the_passes_over_a_batch(values) -> None:
    question = "Is the model a mixture of experts?"
    for passes, replay in ((1, "none"), (2, "R2"), (4, "R3")):
        run = config(values, epochs_per_batch=passes)
        found = told(run, {}, is_mixture=True)[question]
        assert f"replay of routing: {replay}" in found.choice
        assert bool(found.set_these) is (replay == "R3")


def test_tokens_behind_tools_are_compared_with_the_others(values) -> None:
    question = "Do tokens after tool output need more?"
    row = {"rollout_corr/post_tool/token_fraction": 0.2, "rollout_corr/other/std": 0.01}
    wide = told(config(values), row | {"rollout_corr/post_tool/std": 0.05})[question]
    assert wide.choice.startswith("they do")
    assert wide.set_these == ("trainer.correction.post_tool_upper = 1.5",)
    bounded = config(values, correction={"post_tool_upper": 1.2})
    assert told(bounded, row | {"rollout_corr/post_tool/std": 0.05})[question].set_these == ()
    same = told(config(values), row | {"rollout_corr/post_tool/std": 0.015})[question]
    assert same.choice.startswith("no")


def test_each_warning_has_its_remedy_and_says_how_often_it_came(values) -> None:
    assert {bound.metric for bound in correction_settings._BOUNDS} == set(_REMEDIES)
    found = told(config(values), {}, {"rollout_corr/chi2_token": 3.0}, {})
    [warned] = [one for question, one in found.items() if "chi2_token" in question]
    assert "(1 of 3 steps)" in warned.seen
    assert "max_staleness" in warned.choice


def test_the_command_prints_it_and_refuses_a_run_without_steps(values, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_config.save(config(values), folder / "config.toml")
    command = ["advise", "--run", str(folder)]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code != 0
    assert "no step has trained yet" in refused.output
    rows = [FRESH, FRESH | {"skipped": "noise"}, FRESH | {"staleness_max": 2}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert 'set:    trainer.objective.surrogate = "decoupled"' in shown.output
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert "2 steps" in as_json[0]["seen"]
