"""The benchmark's baselines and its two tenants: samples, steps, and what tables make of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.own_agent.agent import opening
from benchmarks.own_agent.baselines import as_result, cell_of
from benchmarks.own_agent.offline import (
    METHODS,
    Method,
    config_for,
    drawn,
    least_likely,
    sample,
    trained,
)
from benchmarks.own_agent.poisoned import most_of, poisoned_table
from benchmarks.own_agent.recorded import HintedState, Recorded
from benchmarks.own_agent.serving import MODEL, ROOT
from benchmarks.own_agent.table import table, until_table
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.evaluate import Rate
from examples.tool_lab.local_generate import RENDERER
from opd.run.recipe import recipe
from records.names import TurnState, TurnType
from records.types import TurnRecord
from rollout_bridge.rendering.rendering import Rendering
from tests.test_own_agent_benchmark import result_of
from trainer.config import TrainerConfig
from trainer.model.lora import adapter_state

START = str(ROOT / MODEL)


@pytest.fixture(scope="module")
def config() -> Any:
    return SimpleNamespace(trainer=TrainerConfig(**recipe(128)["trainer"]))


@pytest.fixture(scope="module")
def turn() -> TurnRecord:
    rendering = Rendering.load(START, RENDERER)
    messages = opening("Hello there.")
    answer = np.asarray(
        [*rendering.prompt_ids(messages, TOOLS)[-3:], rendering.stop_token_ids[-1]], dtype=np.int32
    )
    return TurnRecord(
        turn_id="t",
        session_id="s",
        parent_turn_id=None,
        turn_type=TurnType.MAIN,
        state=TurnState.TRAINED,
        drop_reason=None,
        messages=messages,
        tools=TOOLS,
        response={"role": "assistant", "content": "Hello."},
        next_state=[],
        prompt_ids=rendering.prompt_ids(messages, TOOLS),
        response_ids=answer,
        rollout_logprobs=np.full(len(answer), -1.0, dtype=np.float32),
        sampling={},
        distribution_modified=None,
        version_spans=(),
        finish_reason="stop",
        created_at=0.0,
    )


def test_places_are_drawn_equally_often() -> None:
    found = drawn(random.Random(0), ["a", "b", "c"], 7)
    assert len(found) == 7
    assert {found.count(one) for one in "abc"} == {2, 3}
    with pytest.raises(ValueError, match="nothing"):
        drawn(random.Random(0), [], 2)


def test_a_quarter_of_the_tokens_is_punished() -> None:
    logprobs = np.array([-0.1, -3.0, -0.2, -0.3, -2.0], dtype=np.float32)
    assert least_likely(logprobs).tolist() == [0, 1, 0, 0, 1]
    assert least_likely(logprobs[:1]).tolist() == [1]


def test_methods_differ_in_their_objective_alone(config: Any) -> None:
    own = config.trainer
    names = {method: config_for(method, own).objective.name for method in METHODS}
    assert names == {
        "sft": "forward_kl_topk",
        "negative": "hindsight_opd",
        "binary": "hindsight_opd",
        "contrast": "hindsight_opd",
        "hint-only": "topk_tail_reverse_kl",
    }
    other = config_for("binary", own)
    assert (other.learning_rate, other.epochs_per_batch) == (own.learning_rate, 4)
    assert other.objective.needs == {"reward"}


def test_a_sample_without_a_teacher_has_a_reward(turn: TurnRecord) -> None:
    made = sample(0, turn, turn.response_ids, turn.rollout_logprobs, None, reward=-1.0)
    assert made.reward == -1.0
    assert np.isnan(made.teacher_logprobs).all()
    assert made.teachings == ()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_runs_steps(method: Method, config: Any, turn: TurnRecord) -> None:
    data = Recorded(
        config=config,
        steps=(2,),
        hinted=(HintedState(turn=turn, hint="Address the user as Captain."),),
        objected=(turn,),
        accepted=(replace(turn, response_ids=turn.response_ids[::-1].copy()),),
    )
    policy, said = trained(method, data, START, ["title"], 0)
    assert len(said) == 1
    assert said[0].startswith("step 1: 2 samples, loss ")
    moved = [name for name, one in adapter_state(policy.base_model).items() if "lora_B" in name]
    assert any(bool(adapter_state(policy.base_model)[name].abs().max() > 0) for name in moved)


def test_a_baseline_is_a_row_beside_its_cell(tmp_path: Path) -> None:
    cell = result_of(0, None, 90) | {"run": "unit-seed0"}
    (tmp_path / "unit.json").write_text(json.dumps(cell))
    folder = tmp_path / "runs" / "unit-seed0"
    path, found = cell_of(folder)
    assert (path.name, found["seed"]) == ("unit.json", 0)
    data: Any = SimpleNamespace(steps=(24, 20), objected=(1, 2, 3))
    made = as_result(cell, "sft", data, {"wanted_unit": Rate(hits=50, count=100)}, 12.0)
    (tmp_path / "unit.baseline-sft.json").write_text(json.dumps(made))
    assert cell_of(folder)[0] == path
    row = table([made]).splitlines()[-1]
    assert row.startswith("| baseline sft | unit |")
    assert "0.200 → 0.500" in row
    assert "| 44; none |" in row
    assert until_table([made]) == ""
    with pytest.raises(SystemExit, match="measured first"):
        cell_of(tmp_path / "runs" / "other")


STEPS = [
    {"version": 1, "parts": [["tenant:a", "keep", 2], ["tenant:b", "hint", 6]]},
    {"version": 2, "parts": [["tenant:a", "live", 3], ["tenant:b", "live", 1]]},
]


def test_the_largest_part_of_a_step_is_told_by_kind() -> None:
    assert most_of(STEPS, "b") == 0.75
    assert most_of(STEPS, "b", ("live", "hint")) == 1.0
    assert most_of(STEPS, "b", ("live",)) == 0.25
    assert most_of(STEPS, "b", ("counter",)) is None


def test_two_tenants_have_a_row_of_their_own() -> None:
    one = result_of(0, 3, 90)
    one["protocol"] |= {"poisoned": True, "others": ["order"], "settings": []}
    one |= {"of_a": {"objections": {"order": 2}}, "steps": STEPS, "max_share": 0.5}
    row = poisoned_table([one]).splitlines()[-1]
    assert row.startswith("| two tenants | unit | order | 0 | 3; 2 | 0.200")
    assert row.endswith("| 0.75; 1.00; 0.25 | 0.5 | 2 |")
    assert poisoned_table([result_of(0, 3, 90)]) == ""
