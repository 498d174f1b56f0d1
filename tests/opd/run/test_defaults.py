"""The configuration of a run on one machine, completed from the model and the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.tool_lab.run_lab import MODEL
from opd.run.config import RunConfig
from opd.run.defaults import model_facts, resolve, single_machine
from opd.run.recipe import recipe
from trainer.errors import ConfigError, StartupError


def resolved(folder: Path, *overrides: str) -> RunConfig:
    return resolve(single_machine(str(MODEL), folder), None, list(overrides))


def test_judge_and_teacher_are_the_frozen_engine_unless_said_otherwise(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert config.policy.base_url != config.frozen.base_url
    assert config.judge.base_url == f"{config.frozen.base_url}/v1"
    assert config.judge.max_prompt_tokens + config.judge.max_tokens == 32768
    assert config.scoring.context_length == 32768
    assert config.scoring.expected_version == "0"


def served(folder: Path, *overrides: str) -> RunConfig:
    """As a new `opd serve` run."""
    return resolve(single_machine(str(MODEL), folder), None, list(overrides), None, recipe)


def test_a_new_run_serves_policy_judge_and_teacher_from_one_engine(tmp_path: Path) -> None:
    config = served(tmp_path, "policy.embedded.threads=2")
    assert config.frozen.shared
    assert config.frozen.embedded == config.policy.embedded
    assert config.policy.embedded is not None
    assert config.policy.embedded.threads == 2
    assert config.judge.base_url == f"{config.policy.base_url}/v1"


@pytest.mark.parametrize(
    "override",
    [
        "frozen.shared=false",
        "trainer.lora=false",
        "trainer.publish=merged",
        "frozen.url=http://127.0.0.1:9",
        "policy.url=http://127.0.0.1:9",
        "frozen.embedded.threads=2",
        "frozen.embedded.port=7",
    ],
)
def test_what_asks_for_two_engines_gets_them(tmp_path: Path, override: str) -> None:
    config = served(tmp_path, override)
    assert not config.frozen.shared
    assert config.frozen.base_url != config.policy.base_url


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.lora=false", "frozen.shared: all of the policy's weights change: set trainer."),
        ("trainer.publish=merged", "frozen.shared: all of the policy's weights change"),
        ("policy.url=http://127.0.0.1:9", "frozen.shared: only an engine that the run starts can"),
        ("frozen.embedded.model=other", "frozen.shared: policy.embedded.model and frozen.embedded"),
    ],
)
def test_sharing_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        served(tmp_path, "frozen.shared=true", override)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_model_of_experts_gets_two_engines(tmp_path: Path) -> None:
    """Their adapters cannot be served beside the base."""
    model = tmp_path / "experts"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_experts": 4}))
    made = resolve(single_machine(str(model), tmp_path), None, [], None, recipe)
    assert not made.frozen.shared


def test_another_judge_keeps_its_own_address(tmp_path: Path) -> None:
    config = resolved(tmp_path, "judge.base_url=http://127.0.0.1:9/v1", "judge.model=big")
    assert config.judge.base_url == "http://127.0.0.1:9/v1"
    assert config.judge.model == "big"


def test_teacher_on_a_server_of_its_own_names_its_version_itself(tmp_path: Path) -> None:
    config = resolved(tmp_path, "frozen.url=http://127.0.0.1:9")
    assert config.frozen.base_url == "http://127.0.0.1:9"
    assert config.scoring.expected_version is None


def test_judge_model_without_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set judge\.base_url too"):
        resolved(tmp_path, "judge.model=big")


def test_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load") as raised:
        model_facts(str(tmp_path / "nothing"))
    assert "\n" not in str(raised.value)


def test_ports_are_chosen_once_and_differ(tmp_path: Path) -> None:
    config = resolved(tmp_path, "proxy.port=0")
    ports = {config.policy.base_url, config.frozen.base_url}
    assert len(ports) == 2
    assert config.proxy.port != 0


def test_renderer_is_the_familys_where_it_equals_the_template(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    assert (config.renderer.name, config.renderer.enable_thinking) == ("qwen3", False)


def test_renderer_is_default_where_the_template_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant", "<|im_start|>bot"))
    config = resolve(single_machine(str(folder), tmp_path), None, [])
    assert config.renderer.name == "default"


def test_named_renderer_is_taken_as_it_is(tmp_path: Path) -> None:
    config = resolved(tmp_path, "renderer.name=default")
    assert config.renderer.name == "default"


def test_model_without_chat_template_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"renderer: .*chat template"):
        resolve(single_machine(str(folder), tmp_path), None, [])


def test_unknown_renderer_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"renderer: .*qwen4.*qwen3"):
        resolved(tmp_path, "renderer.name=qwen4")


def test_teachers_that_the_run_starts_have_ports_and_score(tmp_path: Path) -> None:
    first = resolved(
        tmp_path,
        f"teachers.math.embedded.model={MODEL}",
        "teachers.math.replicas=2",
        "scoring.routes.tools.run=math",
    )
    group = first.teachers["math"]
    assert len(set(group.ports)) == 2
    assert first.scoring.urls_of_teacher("math") == group.urls
    assert [group.engine(n).port for n in (0, 1)] == group.ports
    # As when the run goes on with its own configuration, one engine more.
    values = first.model_dump(mode="json", exclude_none=True)
    again = resolve(values, None, ["teachers.math.replicas=3"])
    assert again.teachers["math"].ports[:2] == group.ports
    assert again.scoring.urls_of_teacher("math") == again.teachers["math"].urls
    assert len(again.teachers["math"].ports) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teachers.math.replicas=2", "teachers.math.embedded: Field required"),
        ("teachers.math.embedded.model=nowhere", "nowhere"),
        ("scoring.routes.tools.run=math", "no teacher is called 'math'"),
        ("teachers=5", "teachers"),
    ],
)
def test_teachers_that_cannot_be_started_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        resolved(tmp_path, override)


def test_a_name_for_a_teacher_here_and_one_elsewhere_is_refused(tmp_path: Path) -> None:
    words = [f"teachers.math.embedded.model={MODEL}", "scoring.teachers.math=http://10.0.0.1:1"]
    with pytest.raises(ConfigError, match=r"scoring.teachers.math: the run starts a teacher"):
        resolved(tmp_path, *words)
