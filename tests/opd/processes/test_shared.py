"""What the processes of a run are composed of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from examples.tool_lab.run_lab import MODEL
from judge.votes.context import estimate_tokens
from opd.cluster.flag_check import REPOSITORY
from opd.cluster.launching.prepare import resolve as resolve_cluster
from opd.processes.roles.judge import judge_config, judge_counter
from opd.processes.roles.judge_role import freshness_of, side_sampler_of
from opd.processes.shared import client_of
from opd.run.config import RunConfig
from opd.run.defaults import resolve, single_machine
from opd.run.recipe import recipe
from rollout_bridge.config import RendererConfig
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.keys import EngineKeys, ensure_key_file, read_key_file
from rollout_bridge.rendering.rendering import Rendering
from trainer.errors import ConfigError
from trainer.model.model_config import model_vocab_size


def test_a_judge_that_is_the_runs_own_model_has_its_tokens_counted_exactly(tmp_path: Path) -> None:
    values = single_machine(str(MODEL), tmp_path)
    rendering = Rendering.load(str(MODEL), RendererConfig(name="qwen3"))
    text = "[user] Find me a hotel in the city, please. " * 20
    own = judge_counter(resolve(values, None, []), rendering)
    assert own(text) == len(rendering.tokenizer(text)["input_ids"])
    other = ["judge.base_url=http://127.0.0.1:9/v1", "judge.model=big"]
    assert judge_counter(resolve(values, None, other), rendering) is estimate_tokens


def changed_model(folder: Path, **changes: object) -> Path:
    shutil.copytree(MODEL, folder)
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


async def test_ids_of_the_models_head_beyond_the_tokenizer_may_be_sent(tmp_path: Path) -> None:
    model = changed_model(tmp_path / "model", vocab_size=1024)
    config = resolve(single_machine(str(model), tmp_path), None, [])
    assert Rendering.load(str(model), config.renderer).vocab_size < 1024
    assert config.policy.embedded is not None
    assert config.policy.embedded.api_key_file == tmp_path / "engine.key"
    ensure_key_file(tmp_path / "engine.key")
    async with client_of(config, config.policy) as client:
        assert client.vocab_size == 1024


def on_a_cluster(objective: str) -> RunConfig:
    asked = [f"trainer.objective={objective}", "trainer.beta_kl=0.0", "scoring.top_k=5"]
    config = resolve_cluster(REPOSITORY / "configs" / "qwen3_8b.toml", asked, Path("/runs/x"))[0]
    return config.model_copy(update={"model": str(MODEL)})


@pytest.mark.parametrize(
    ("objective", "length"),
    [
        ("{name = 'side_samples', samples = 6}", 6),
        ("{name = 'sparse_kl', topk = 5}", 5),
        ("{name = 'sparse_kl', topk = 5, support_of = 'teacher'}", None),
        ("{name = 'hindsight_opd'}", None),
    ],
)
async def test_on_a_cluster_the_judges_process_draws_what_the_objective_needs(
    lab_engine: str, objective: str, length: int | None
) -> None:
    config = on_a_cluster(objective)
    async with EngineClient(lab_engine) as policy:
        sampler = side_sampler_of(config, policy)
        assert (sampler is None) == (length is None)
        # The embedded trainer draws them itself.
        assert side_sampler_of(config.model_copy(update={"cluster": None}), policy) is None
        if sampler is not None:
            ids = np.arange(5, 15, dtype=np.int32)
            drawn = await sampler.draw(ids[:6], ids[6:], "session")
            assert drawn.ids.shape == (4, length)


def test_vocabulary_size_of_a_model_with_several_parts_is_its_text_parts(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 321}
    content = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert model_vocab_size(str(tmp_path)) == 321


def test_a_model_without_vocabulary_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="vocabulary size"):
        model_vocab_size(str(tmp_path))


def test_the_judge_gets_the_key_of_the_engine_that_judges(tmp_path: Path) -> None:
    values = single_machine(str(MODEL), tmp_path)
    own = resolve(values, None, [])
    ensure_key_file(tmp_path / "engine.key")
    key = read_key_file(tmp_path / "engine.key")
    assert own.policy.keys == own.frozen.keys == EngineKeys(api=key)
    assert judge_config(own).api_key.get_secret_value() == key
    given = resolve(values, None, ["judge.api_key=mine"])
    assert judge_config(given).api_key.get_secret_value() == "mine"
    other = ["judge.base_url=http://127.0.0.1:9/v1", "judge.model=big"]
    # The run's secret goes to nobody else.
    assert judge_config(resolve(values, None, other)).api_key.get_secret_value() == "none"
    server = ["frozen.url=http://127.0.0.1:9", "frozen.api_key=k", "frozen.admin_api_key=a"]
    served = resolve(values, None, server)
    assert served.frozen.keys == EngineKeys(api="k", admin="a")
    assert judge_config(served).api_key.get_secret_value() == "k"


def test_a_missing_key_file_is_a_line(tmp_path: Path) -> None:
    config = resolve(single_machine(str(MODEL), tmp_path), None, [])
    with pytest.raises(ConfigError, match=r"engine\.key"):
        _ = config.policy.keys


def test_a_step_that_practises_takes_no_more_live_turns_than_its_hinted_places(
    tmp_path: Path,
) -> None:
    values = {**single_machine(str(MODEL), tmp_path), "made_by": "serve"}
    practising = freshness_of(resolve(values, None, [], None, recipe))
    assert practising is not None
    assert practising.batch_size == 9
    alone = freshness_of(resolve(values, None, ["rehearsal.enabled=false"], None, recipe))
    assert alone is not None
    assert alone.batch_size == 24
