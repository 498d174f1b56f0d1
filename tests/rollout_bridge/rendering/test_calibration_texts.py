"""The sequences of the calibration, for templates that refuse what other models take."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.calibration_texts import CONVERSATIONS, calibration_sequences
from rollout_bridge.rendering.rendering import Rendering
from tests.rollout_bridge.chat_tokenizers import write_tokenizer

NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
NO_TOOLS = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
SHOW = "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"


def loaded(folder: Path, refusals: str) -> Rendering:
    write_tokenizer(folder, None)
    template = "{% for m in messages %}" + refusals + SHOW + "{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return Rendering.load(str(folder), RendererConfig(name="default"))


@pytest.mark.parametrize(
    ("refusals", "num_conversations"),
    [("", 3), (NO_SYSTEM, 3), (NO_TOOLS, 2), (NO_SYSTEM + NO_TOOLS, 2)],
)
def test_a_template_that_refuses_a_role_can_be_calibrated(tmp_path, refusals, num_conversations):
    rendering = loaded(tmp_path, refusals)
    sequences = calibration_sequences(rendering, 0)
    assert len(sequences) == num_conversations + 3
    texts = [rendering.decode(ids) for ids in sequences[:num_conversations]]
    assert str(CONVERSATIONS[1][-1]["content"]) in texts[1]
    assert ("You answer briefly." in texts[1]) == ("system" not in refusals)


def test_equal_seeds_give_equal_sequences(tmp_path):
    rendering = loaded(tmp_path, "")
    first, again = calibration_sequences(rendering, 3), calibration_sequences(rendering, 3)
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]
