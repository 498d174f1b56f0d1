"""config.json -> Megatron's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.cluster.architecture import (
    Architecture,
    ArchitectureError,
    from_config_json,
    megatron_flags,
    read_architecture,
)
from tests.examples.shipped import MODEL
from tests.opd.cluster.examples import values


def config_json(**changes: Any) -> dict[str, Any]:
    """A config.json as it is published, with keys that are not ours."""
    own = dict(values()["cluster"]["architecture"])
    return {
        **own,
        "torch_dtype": "bfloat16",
        "rope_scaling": None,
        "sliding_window": None,
        **changes,
    }


def flags(**changes: Any) -> dict[str, tuple[str, ...]]:
    found = megatron_flags(from_config_json(config_json(**changes), "config.json"))
    return {flag[0]: flag[1:] for flag in found}


def test_published_config_gives_the_section_of_the_example() -> None:
    expected = Architecture.model_validate(values()["cluster"]["architecture"])
    assert from_config_json(config_json(), "config.json") == expected


def test_new_layout_of_rope_is_read_too() -> None:
    new = config_json(rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    del new["rope_theta"]
    assert from_config_json(new, "config.json").rope_theta == 5e6


def test_a_real_model_folder_is_read() -> None:
    model = read_architecture(MODEL)
    assert model.model_type == "qwen3"
    assert ("--hidden-size", str(model.hidden_size)) in megatron_flags(model)


def test_families_differ_in_biases_and_norms() -> None:
    assert "--qk-layernorm" in flags()
    assert "--add-qkv-bias" not in flags()
    assert "--add-qkv-bias" in flags(model_type="qwen2")
    assert "--qk-layernorm" not in flags(model_type="llama")


def test_untied_embeddings_are_a_flag() -> None:
    assert "--untie-embeddings-and-output-weights" not in flags()
    assert "--untie-embeddings-and-output-weights" in flags(tie_word_embeddings=False)


def test_weights_of_experts_sum_to_one_as_the_model_says() -> None:
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    moe["moe_intermediate_size"] = 64
    assert "--moe-router-pre-softmax" not in flags(**moe, norm_topk_prob=True)
    assert "--moe-router-pre-softmax" in flags(**moe, norm_topk_prob=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "qwn3"}, r"model_type 'qwn3' is not one of llama, qwen2"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope scaling 'yarn' cannot be derived"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"mlp_only_layers": [0]}, "dense layers between"),
        ({"hidden_size": None}, "hidden_size: Field required"),
    ],
)
def test_what_flags_cannot_say_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArchitectureError, match=reason):
        from_config_json(config_json(head_dim=128, **changes), "config.json")


def test_folder_without_config_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"cluster\.architecture"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchitectureError, match="cannot read"):
        read_architecture(tmp_path)


def test_section_of_another_model_is_refused(tmp_path: Path) -> None:
    from opd.cluster.launching.prepare import resolve
    from trainer.errors import ConfigError

    model, config = tmp_path / "model", tmp_path / "c.toml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_json(num_hidden_layers=28)))
    config.write_text((Path(__file__).parents[3] / "configs/qwen3_4b.toml").read_text())
    with pytest.raises(ConfigError, match=r"num_hidden_layers 36 against 28"):
        resolve(config, [f"model={model}"], tmp_path / "run")
