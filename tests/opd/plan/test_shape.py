"""What a model's config.json tells of its size, beside the model that transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.plan.shape import shape_of
from tests.rollout_bridge.model_families import FAMILIES, config_of, model_of
from trainer.config import LoraConfig
from trainer.errors import ConfigError
from trainer.model.lora import add_adapters

FUSED = ("Phi-3", "GLM 4")
"""Layers that others have two or three of are one: their adapters are smaller."""
EXPERTS = ("Qwen 3, experts", "Mixtral", "gpt-oss")
"""Adapters on experts are shaped as peft decides."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    config_of(family).save_pretrained(tmp_path)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1)
    # gpt-oss has a bias for each expert, which is a matrix of them.
    slack = 0.03 if family == "gpt-oss" else 0.0
    assert shape_of(str(tmp_path)).num_parameters == pytest.approx(matrices, rel=slack)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in (*FUSED, *EXPERTS)])
def test_adapters_are_as_large_as_those_that_are_made(family: str, tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    adapted = add_adapters(model_of(family), LoraConfig(rank=3, alpha=6), seed=0)
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    assert shape_of(str(tmp_path)).adapter_parameters(3) == trained


def test_the_text_part_of_a_model_with_images_counts(tmp_path: Path) -> None:
    config = config_of("Gemma 3")
    text = config.to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "gemma3", "tie_word_embeddings": true, "text_config": {text}}}'
    )
    alone = tmp_path / "alone"
    config.save_pretrained(alone)
    assert shape_of(str(tmp_path)) == shape_of(str(alone))


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(ConfigError, match="does not state its num_attention_heads"):
        shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read"):
        shape_of(str(tmp_path / "nothing"))
