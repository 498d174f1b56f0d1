from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.fingerprint import renderer_fingerprint
from rollout_bridge.rendering.rendering import Rendering
from tests.examples.shipped import MODEL

CONFIG = RendererConfig(name="default")


def of(model: Path, config: RendererConfig = CONFIG) -> str:
    return renderer_fingerprint(Rendering.load(str(model), config), config)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The shipped model's tokenizer elsewhere."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def test_it_names_content_and_not_a_place(copy: Path) -> None:
    assert of(copy) == of(MODEL)
    assert len(of(MODEL)) == 64


def test_it_does_not_depend_on_earlier_calls() -> None:
    rendering = Rendering.load(str(MODEL), CONFIG)
    before = renderer_fingerprint(rendering, CONFIG)
    rendering.tokenizer("a long text", return_offsets_mapping=True)
    rendering.prompt_ids([{"role": "user", "content": "<|im_end|>"}])
    assert renderer_fingerprint(rendering, CONFIG) == before


def test_another_template_is_another_renderer(copy: Path) -> None:
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + "\n{# changed #}")
    assert of(copy) != of(MODEL)


def test_another_vocabulary_is_another_renderer(copy: Path) -> None:
    rendering = Rendering.load(str(copy), CONFIG)
    before = renderer_fingerprint(rendering, CONFIG)
    rendering.tokenizer.backend_tokenizer.add_tokens(["<extra>"])
    assert renderer_fingerprint(rendering, CONFIG) != before


def test_another_setting_is_another_renderer() -> None:
    other = RendererConfig(name="default", enable_thinking=False)
    assert of(MODEL, other) != of(MODEL)
