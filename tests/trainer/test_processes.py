"""What the processes of a run are composed of."""

from __future__ import annotations

from pathlib import Path

from examples.tool_lab.run_lab import MODEL
from judge.context import estimate_tokens
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering import Rendering
from trainer.defaults import resolve, single_machine
from trainer.processes import judge_counter


def test_a_judge_that_is_the_runs_own_model_has_its_tokens_counted_exactly(tmp_path: Path) -> None:
    values = single_machine(str(MODEL), tmp_path)
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3"))
    text = "[user] Find me a hotel in the city, please. " * 20
    own = judge_counter(resolve(values, None, []), rendering)
    assert own(text) == len(rendering.tokenizer(text)["input_ids"])
    other = ["judge.base_url=http://127.0.0.1:9/v1", "judge.model=big"]
    assert judge_counter(resolve(values, None, other), rendering) is estimate_tokens
