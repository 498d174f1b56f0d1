from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config import TrainerConfig
from trainer.model.model_config import held_dtype

LAB = Path(__file__).parents[3] / "examples" / "tool_lab" / "model"


@pytest.mark.parametrize(
    ("stated", "held"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float32"),
    ],
)
def test_frozen_weights_are_held_as_they_are_stored(tmp_path, stated, held) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **stated}))
    assert held_dtype(str(tmp_path), "auto") == held
    assert held_dtype(str(tmp_path), "float32") == "float32"
    assert held_dtype(str(tmp_path), "bfloat16") == "bfloat16"


def test_the_labs_model_stays_in_float32() -> None:
    assert held_dtype(str(LAB), TrainerConfig().base_dtype) == "float32"
