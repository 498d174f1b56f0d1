"""What a run is said to take, whether it fits, and what would make it fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import sizing
from opd.cli.app import app
from opd.cli.plan import bytes_of
from opd.plan.memory import GIB, MIB, Load
from opd.plan.run_plan import USUAL_LOAD, faster, gibibytes, plan_of, remedies
from opd.plan.said import serve_line
from opd.run.config import RunConfig
from opd.run.defaults import as_planned
from opd.run.recipe import recipe
from tests.examples.shipped import MODEL as LAB
from trainer.errors import ConfigError, StartupError

ROOT = Path(__file__).parents[3]
QWEN_4B = sizing.MODELS["Qwen3 4B"]
CONFIG = """{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
 "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
 "vocab_size": 151936, "tie_word_embeddings": false, "max_position_embeddings": 40960,
 "dtype": "bfloat16"}"""


def config(*overrides: str, file: Path | None = None) -> RunConfig:
    return as_planned(str(LAB), file, list(overrides), recipe)


def total(*overrides: str, load: Load = USUAL_LOAD) -> float:
    return plan_of(config(*overrides), QWEN_4B, "bfloat16", load).total()


def test_what_is_larger_takes_more() -> None:
    usual = total()
    assert total("trainer.lora=false") > total("frozen.shared=false") > usual
    assert total("policy.embedded.kv_cache_gib=4") > usual
    assert total("trainer.micro_batch_tokens=8192") > usual
    assert total("trainer.gradient_checkpointing=false") > usual
    assert total(load=replace(USUAL_LOAD, context=8192)) > usual
    assert total(load=replace(USUAL_LOAD, requests=1)) < usual
    workers = total("proxy.workers=2"), total("proxy.workers=3")
    assert workers[1] - workers[0] == workers[0] - usual > 100 * MIB
    one = total(f"teachers.other.embedded.model={LAB}", "scoring.routes.tools.run=other")
    two = total(f"teachers.other.embedded.model={LAB}", "teachers.other.replicas=2")
    assert two - one == pytest.approx(one - usual)
    assert one > usual
    # Weights in float32 for the engine, in bfloat16 for the trainer.
    assert usual > QWEN_4B.num_parameters * 6


def test_a_faster_setting_is_named_where_there_is_room() -> None:
    def said(memory: float | None, *overrides: str) -> str | None:
        return faster(config(*overrides), QWEN_4B, "bfloat16", USUAL_LOAD, memory)

    needed = total("trainer.gradient_checkpointing=false")
    line = said(2.1 * needed)
    assert line is not None
    assert line.startswith("trainer.gradient_checkpointing=false")
    assert line.endswith(gibibytes(needed))
    assert said(1.9 * needed) is said(None) is None
    for chosen in (
        *("trainer.gradient_checkpointing=true", "trainer.gradient_checkpointing=false"),
        *("trainer.memory_gb=4", "trainer.device=cuda"),
    ):
        assert said(100 * needed, chosen) is None
    small = replace(QWEN_4B, width=256)
    assert faster(config(), small, "bfloat16", USUAL_LOAD, 100 * needed) is None


def test_a_context_is_no_longer_than_the_model_s() -> None:
    plan = plan_of(config(), QWEN_4B, "bfloat16", Load(context=10**6, requests=1))
    assert plan.load.context == QWEN_4B.context_length


def test_what_would_make_it_fit_does() -> None:
    shape, held = sizing.MODELS["SmolLM2 135M"], "bfloat16"
    given = config("trainer.lora=false")
    needed = plan_of(given, shape, held, USUAL_LOAD).total()
    found = remedies(given, shape, held, USUAL_LOAD, memory=needed - 4 * GIB, gpu=None)
    assert [one.split(" (")[0] for one in found] == [
        "adapters instead of all weights",
        "one engine for policy, judge and teacher",
    ]
    assert total("trainer.lora.rank=8", "frozen.shared=true") < total("trainer.lora=false")
    assert remedies(given, shape, held, USUAL_LOAD, memory=256 * MIB, gpu=None) == []
    last = remedies(given, shape, held, USUAL_LOAD, memory=2.75 * GIB, gpu=None)[-1]
    assert re.search(r"policy.embedded.context_length=\d+, trainer.micro_batch_tokens=\d+", last)


def test_the_page_has_what_the_plan_says() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    for row in sizing.rows():
        assert row in page


@pytest.mark.parametrize("name", ["laptop", "one_gpu"])
def test_a_shipped_configuration_is_planned(name: str) -> None:
    file = ROOT / "configs" / f"{name}.toml"
    options = ["--gpu", "24G"] if name == "one_gpu" else ["--memory", "8G"]
    shown = CliRunner().invoke(app, ["plan", "--model", str(LAB), "--config", str(file), *options])
    assert shown.exit_code == 0, shown.output
    assert "does not fit" not in shown.output
    assert ("server" in shown.output) is (name == "one_gpu")


def test_a_folder_with_nothing_but_a_configuration_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    shown = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--memory", "16G"])
    assert shown.exit_code == 0, shown.output
    assert "8,190 million parameters" in shown.output
    assert "does not fit" in shown.output
    assert "no setting makes it fit" in shown.output


def test_a_model_larger_than_memory_is_said_before_anything_starts(tmp_path: Path) -> None:
    large = CONFIG.replace('"num_hidden_layers": 36', '"num_hidden_layers": 36000')
    (tmp_path / "config.json").write_text(large)
    with pytest.raises(StartupError, match=r"alone take [\d.]+ GiB of [\d.]+ GiB"):
        serve_line(as_planned(str(tmp_path), None, [], recipe))
    assert serve_line(config()).startswith("memory: about ")


def test_a_model_that_does_not_say_its_sizes_is_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}'
    )
    line = serve_line(config().model_copy(update={"model": str(tmp_path)}))
    assert line.startswith("memory: not estimated (")
    assert "intermediate_size" in line


@pytest.mark.parametrize("model", ["./nothing-here", "nobody/nothing"])
def test_a_model_that_is_not_there_is_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a network the hub's client tries for 20 s.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = CliRunner().invoke(app, ["plan", "--model", model])
    assert shown.exit_code == 2
    assert shown.output.startswith(f"error: model: cannot load '{model}'")


def test_what_settings_limit_is_not_planned_for() -> None:
    shape, load = sizing.MODELS["SmolLM2 135M"], Load(context=8192, requests=64)

    def parts(*overrides: str) -> dict[str, float]:
        plan = plan_of(
            config("policy.embedded.kv_cache_gib=100", *overrides), shape, "bfloat16", load
        )
        return {part.what: part.size for part in plan.parts if "requests" in part.what}

    [(_, whole)] = parts().items()
    [(_, few)] = parts("policy.embedded.max_batch=16").items()
    [(words, short)] = parts("policy.embedded.context_length=4096").items()
    assert (whole / few, whole / short) == (4, 2)
    assert words == "64 requests of 4,096 tokens"
    trainer = plan_of(config("trainer.memory_gb=1.5"), shape, "bfloat16", load).by_process()[
        "trainer"
    ]
    assert trainer == pytest.approx(1.5e9)


def test_one_server_for_all_changes_no_base() -> None:
    both = ["policy.url=http://127.0.0.1:1/", "frozen.url=http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match=r'trainer.publish = "adapter"'):
        config(*both)
    config(*both, "trainer.publish=adapter")


@pytest.mark.parametrize(
    ("text", "size"), [("16G", 16 * GIB), ("800M", 800 * MIB), ("1.5 GiB", 1.5 * GIB)]
)
def test_sizes(text: str, size: float) -> None:
    assert bytes_of(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "0", "much", "-3G", "3X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="give a size such as 16G"):
        bytes_of(text, "--memory")
